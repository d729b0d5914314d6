"""The names of arguments in other libraries, and what to pass instead."""

from collections.abc import Sequence

# For arguments that a function has: what to pass, and other names for the first of them.
_REMEDIES = {
    "metric patience": (
        "Pass `metric`, the name of a metric of the evaluation, and its `mode`.",
        "monitor metric_name metric_for_best_model watch",
    ),
    "patience metric": (
        "Any better value counts. To ignore small changes, round the metric in `metric_fn`.",
        "min_delta delta threshold tol tolerance",
    ),
    "mode patience": (
        "Pass `mode='max'` if a larger value is better, or `mode='min'` if a smaller one is.",
        "greater_is_better maximize minimize direction",
    ),
    "patience mode": (
        "Leave it out: `fit` always returns the state of the best evaluation.",
        "restore_best_weights restore_best load_best_model_at_end load_best",
    ),
    "best keep": (
        "Pass `best`, the name of a metric of the evaluation, and its `mode`.",
        "monitor metric metric_for_best_model save_best save_best_only",
    ),
    "keep best": (
        "Pass `keep`, the number of newest checkpoints to keep.",
        "max_to_keep save_total_limit save_top_k keep_last max_checkpoints",
    ),
    "every keep": (
        "Pass `every`, the number of steps between checkpoints.",
        "save_every save_steps save_interval save_interval_steps save_freq every_n_train_steps",
    ),
    "model fsdp": (
        "Pass `model`, the degree of tensor parallelism, such as `model=2`.",
        "tensor tp tensor_parallel tensor_parallel_size model_parallel mp tensor_parallelism",
    ),
    "data fsdp": (
        "Pass `data`, the number of data-parallel groups, such as `data=2`.",
        "dp batch data_parallel data_parallel_size replica replicas ddp data_parallelism",
    ),
    "fsdp model": (
        "Pass `fsdp`, the number of devices to shard the parameters over, such as `fsdp=2`.",
        "shard dp_shard zero zero3 fsdp_size fully_sharded fsdp_parallelism",
    ),
    "pipe model": (
        "Pass `pipe`, the number of stages of a pipeline, such as `pipe=2`.",
        "pp stage stages pipeline pipeline_parallel pipeline_parallel_size",
    ),
    "devices fsdp": (
        "Pass the sizes of axes, such as `data=8`, or a list of `devices`.",
        "num_devices n_devices device_count shape axis_shapes axis_names mesh_shape",
    ),
    "average": (
        "Pass the decay of the average of the weights, `average=0.999`.",
        "ema ema_decay use_ema ema_momentum weight_averaging model_averaging swa",
    ),
    "early_stopping": (
        "Pass `early_stopping=redcoast.EarlyStopping(patience=3)` and an `evaluation`.",
        "patience early_stop stop_early",
    ),
    "evaluation": (
        "Pass `evaluation=redcoast.Evaluation(examples)`.",
        "validation validation_data validation_dataset valid_examples val_examples val_data "
        "val_dataset eval_examples eval_data eval_dataset eval_every eval_steps metrics metric_fn "
        "predict_fn output_fn",
    ),
    "steps": (
        "Pass `steps`, the number of steps.",
        "max_steps num_steps n_steps total_steps train_steps num_train_steps iterations",
    ),
    "epochs": (
        "Pass `epochs`, the number of epochs.",
        "max_epochs num_epochs n_epochs num_train_epochs",
    ),
    "accumulate": (
        "Pass `accumulate`, the number of microbatches of a step.",
        "gradient_accumulation gradient_accumulation_steps grad_accum grad_accumulation "
        "accumulate_grad_batches accumulation_steps microbatches",
    ),
    "compute_dtype": (
        'Pass `compute_dtype="bf16"`.',
        "dtype precision mixed_precision amp bf16 fp16 autocast",
    ),
    "checkpoints": (
        "Pass `checkpoints`, a directory, or `redcoast.Checkpoints(directory, every=...)`.",
        "checkpoint checkpoint_dir checkpoint_path checkpointer ckpt ckpt_dir save_dir save_every "
        "output_dir resume resume_from_checkpoint directory workdir",
    ),
    "log": (
        "Pass functions `(metrics, step)` or `(metrics, step, state)` as `log`. One that returns "
        '`redcoast.STOP` stops the run; see "Look at the state, or stop the run" in the docs.',
        "callbacks callback hooks hook logger loggers on_step on_epoch_end on_eval report_to "
        "log_every verbose progress progress_bar",
    ),
    "optimizer": (
        "It belongs to the optimizer, such as `optax.adamw(learning_rate)`, or "
        "`optax.chain(optax.clip_by_global_norm(1.0), optimizer)`.",
        "lr learning_rate scheduler lr_scheduler schedule weight_decay clip_norm grad_clip clip "
        "max_grad_norm gradient_clip_val gradient_clipping clipnorm opt tx",
    ),
    "key": ("Pass `key=jax.random.key(0)`.", "seed rng random_state prng rng_key prng_key"),
    "mesh": (
        "Pass `mesh=redcoast.make_mesh(...)`.",
        "devices device strategy sharding shardings num_devices distributed accelerator",
    ),
    "trainable": (
        "Pass `trainable`, what is trained: a function of the model, patterns of paths, or a mask.",
        "freeze frozen filter_spec filter_fn trainable_params wrt",
    ),
    "examples": (
        "Pass the data as `examples`.",
        "data dataset train_data train_dataset train_examples dataloader train_dataloader "
        "train_loader loader x inputs",
    ),
    "loss_fn": ("Pass `loss_fn`.", "loss loss_function criterion objective compute_loss"),
    "collate_fn": ("Pass `collate_fn`.", "collate collator data_collator collate_function"),
    "batch_size": (
        "Pass `batch_size`, the number of examples in a step, over all devices.",
        "bs per_device_batch_size per_device_train_batch_size train_batch_size global_batch_size",
    ),
    "max_new_tokens": (
        "Pass `max_new_tokens`.",
        "max_tokens max_length num_tokens length new_tokens max_new",
    ),
}


def remedy_for(name: str, arguments: Sequence[str]) -> str | None:
    """Returns what to pass instead of an argument that a function with these arguments lacks."""
    # A word such as `metric` stands for different arguments of different functions.
    for needed, (remedy, others) in _REMEDIES.items():
        if set(needed.split()) <= set(arguments) and name in others.split():
            return remedy
    return None
