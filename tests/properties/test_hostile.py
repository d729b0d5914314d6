"""Files of strangers: nothing outside of them is read or written, and no code in them runs."""

import json
import os
import pickle
import re
import shutil
import struct
import tracemalloc

import numpy as np
import pytest
from hostile_helpers import READERS, make
from random_models import random_model

import redcoast as rc
from redcoast.models import Whisper, WhisperConfig


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    return make(tmp_path_factory.mktemp("hostile"))


@pytest.fixture
def files(originals, tmp_path):
    shutil.copytree(originals["model"].parent, tmp_path / "files")
    return {name: tmp_path / "files" / name for name in originals}


def refused(files, name, *words):
    with pytest.raises(ValueError, match=".*".join(words)) as error:
        READERS[name](files[name])
    assert str(files[name]) in str(error.value)


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def move_out(file):
    """Puts a file elsewhere, and a link in its place."""
    outside = file.parents[2] / "outside"
    file.rename(outside)
    file.symlink_to(outside)


@pytest.mark.thorough
def test_all_are_read_as_they_are(files):
    for name, read in READERS.items():
        assert read(files[name]) is not None


@pytest.mark.parametrize("form", ["../outside", "/etc/hostname", "a/../../outside", "a\0b", 3])
def test_an_index_that_names_files_elsewhere(files, form):
    move = files["sharded"].parent / "outside"
    (files["sharded"] / "model-00001-of-00006.safetensors").exists()
    shutil.copy(next(files["sharded"].glob("*.safetensors")), move)
    index = files["sharded"] / "model.safetensors.index.json"
    named = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map={**named, next(iter(named)): form})
    refused(files, "sharded", "leads out of its directory|not the name of a file|no `weight_map`")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("model", "config.json"),
        ("model", "model.safetensors"),
        ("sharded", "model.safetensors.index.json"),
        ("adapters", "adapter_config.json"),
        ("adapters", "adapter_model.safetensors"),
        ("checkpoint", "metadata/metadata"),
        ("checkpoint", "state/manifest.ocdbt"),
        ("unsummed", "state/_METADATA"),
    ],
)
def test_links_that_lead_out(files, name, file):
    move_out(files[name] / file)
    refused(files, name, f"{file}.*leads out of")


def test_a_directory_that_is_a_link_in_a_checkpoint(files, tmp_path):
    (files["unsummed"] / "state" / "d").rename(tmp_path / "d")
    (files["unsummed"] / "state" / "d").symlink_to(tmp_path / "d")
    refused(files, "unsummed", "state/d is a link that leads out")


def test_pipes_and_devices_are_not_opened(files):
    os.mkfifo(files["unsummed"] / "state" / "d" / "pipe")
    refused(files, "unsummed", "pipe is neither a file nor a directory")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("model", "config.json"),
        ("model", "model.safetensors"),
        ("sharded", "model.safetensors.index.json"),
        ("adapters", "adapter_config.json"),
        ("adapters", "adapter_model.safetensors"),
        ("checkpoint", "metadata/metadata"),
        ("checkpoint", "checksums.json"),
        ("unsummed", "metadata/metadata"),
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_refused(files, name, file):
    # Opening it would wait for ever for a program that writes to it.
    (files[name] / file).unlink()
    os.mkfifo(files[name] / file)
    with pytest.raises(ValueError, match=r"pipe|neither a file|holds neither|but no"):
        READERS[name](files[name])


@pytest.mark.parametrize("settings", [{"max_source_positions": 10**7}, {"d_model": 10**12}])
def test_sizes_are_compared_before_anything_is_allocated(settings, tmp_path):
    config = WhisperConfig(
        vocab=64, width=8, layers=1, decoder_layers=1, heads=2, hidden=16, mels=4, frames=12,
        positions=10, decoder_start=1,
    )  # fmt: skip
    rc.save_pretrained(random_model(Whisper, config), tmp_path / "whisper")
    edit(tmp_path / "whisper" / "config.json", **settings)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="settings and tensors of different models"):
            rc.load_pretrained(tmp_path / "whisper")
        assert tracemalloc.get_traced_memory()[1] < 2e7
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "options",
    [
        {"lang_to_id": [1], "language": "en"},
        {"lang_to_id": {"<|en|>": 5}, "task_to_id": 3, "language": "en"},
        {"forced_decoder_ids": 5},
        {"forced_decoder_ids": [[1]]},
        {"forced_decoder_ids": [["a", 2], [1, 2]]},
        {"bad_words_ids": 5},
        {"suppress_tokens": {"a": 1}},
    ],
)
def test_options_of_decoding_of_a_wrong_kind_name_the_file(files, options):
    (files["model"] / "generation_config.json").write_text(json.dumps(options))
    with pytest.warns(
        UserWarning, match=r"(?s)generation_config\.json sets (invalid )?options.*(_ids?|tokens)`"
    ):
        rc.load_pretrained(files["model"])


@pytest.mark.few("activation", "type", "size", "many names")
@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "x" * 10**6},
        {"model_type": "x" * 10**6},
        {"num_attention_heads": "x" * 10**6},
        {"x" * 10**6: 1},
        {f"unknown{i}": 1 for i in range(10**4)},
    ],
    ids=["activation", "type", "size", "long name", "many names"],
)
def test_messages_do_not_grow_with_the_file(files, change):
    edit(files["model"] / "config.json", **change)
    with pytest.raises(ValueError, match=r"model") as error:
        READERS["model"](files["model"])
    assert len(str(error.value)) < 20_000


@pytest.mark.thorough
def test_an_index_of_many_missing_files_has_a_short_message(files):
    index = files["sharded"] / "model.safetensors.index.json"
    edit(index, weight_map={f"w{i}": f"missing{i}.safetensors" for i in range(10**4)})
    with pytest.raises(ValueError, match="missing0.*and 9992 more") as error:
        READERS["sharded"](files["sharded"])
    assert len(str(error.value)) < 1000


def test_the_cache_of_hugging_face_is_links_to_blobs(files, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1234"
    blobs = tmp_path / "models--a--b" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(files["sharded"].iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert rc.load_pretrained(snapshot).config.vocab == 32
    os.symlink(snapshot, tmp_path / "link")
    assert rc.load_pretrained(tmp_path / "link").config.vocab == 32


class Harm:
    """Pickled, it is a call."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("name", "file", "words"),
    [
        ("model", "pytorch_model.bin", "pickled"),
        ("model", "model.safetensors", "damaged"),
        ("model", "config.json", "is not JSON"),
        ("adapters", "adapter_model.bin", "pickled"),
        ("checkpoint", "metadata/metadata", "damaged"),
        ("unsummed", "metadata/metadata", "damaged"),
    ],
)
def test_no_pickle_is_opened(files, tmp_path, name, file, words):
    if file.endswith(".bin"):
        next(files[name].glob("*.safetensors")).unlink()
    (files[name] / file).write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    refused(files, name, words)
    assert not (tmp_path / "harm").exists()


def test_an_index_of_pickles(files, tmp_path):
    (files["sharded"] / "a.bin").write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    edit(files["sharded"] / "model.safetensors.index.json", weight_map={"a": "a.bin"})
    refused(files, "sharded", "pickled")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("model", "config.json"),
        ("sharded", "model.safetensors.index.json"),
        ("adapters", "adapter_config.json"),
        ("plan", ""),
        ("unsummed", "metadata/metadata"),
        ("unsummed", "state/_METADATA"),
        ("unsummed", "state/_sharding"),
        ("unsummed", "state/array_metadatas/process_0"),
        ("checkpoint", "checksums.json"),
    ],
)
@pytest.mark.parametrize("text", ['{"a":' * 100_000, "[" * 100_000, "[]", "1" * 5000, "\ud800", ""])
def test_json_that_is_deep_or_none(files, name, file, text):
    (files[name] / file).write_bytes(text.encode("utf-8", "surrogatepass"))
    refused(files, name, file or "plan")


def header(file):
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write_header(file, found, data):
    text = json.dumps(found).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: {"shape": [2**20, 2**18], "data_offsets": [0, 2**40]},
        lambda x: {"shape": [2**62, 2**62]},
        lambda x: {"data_offsets": [x["data_offsets"][0] + 4, x["data_offsets"][1] + 4]},
        lambda x: {"data_offsets": x["data_offsets"][::-1]},
        lambda x: {"dtype": "F8_E8M0"},
    ],
)
@pytest.mark.parametrize("name", ["model", "adapters"])
def test_headers_of_tensors_that_cannot_be(files, name, change):
    file = next(files[name].glob("*.safetensors"))
    found, data = header(file)
    first = next(key for key in found if key != "__metadata__")
    write_header(file, found | {first: found[first] | change(found[first])}, data)
    refused(files, name, "damaged, or not a safetensors file")


def test_a_header_of_a_terabyte(files):
    file = files["model"] / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 2**40) + b"{}")
    refused(files, "model", "damaged, or not a safetensors file")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000"),
        ({"vocab_size": 10**12}, "cannot be loaded|parameters"),
        ({"vocab_size": 0}, "without any|cannot be loaded"),
        ({"num_hidden_layers": -1}, "cannot be loaded|different models"),
        ({"hidden_size": "wide"}, "cannot be loaded"),
        ({"hidden_size": [16]}, "cannot be loaded"),
        ({"hidden_size": 1e300}, "cannot be loaded"),
        ({"num_attention_heads": 0}, "cannot be loaded"),
        ({"model_type": ["llama"]}, "a model of type"),
        ({"eos_token_id": {}}, "cannot be loaded"),
    ],
)
def test_settings_that_cannot_be(files, changes, words):
    edit(files["model"] / "config.json", **changes)
    refused(files, "model", words)


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(", "(?P<a>x)(?P<a>y)", "a*a*a*a*a*a*", "([a-z_.0-9]+)*!", "a{1,9}{1,9}"]
)
def test_patterns_of_adapters_that_take_forever(files, pattern):
    edit(files["adapters"] / "adapter_config.json", alpha_pattern={pattern: 4})
    refused(files, "adapters", "regular expression")


@pytest.mark.parametrize("changes", [{"lora_alpha": "x"}, {"alpha_pattern": {"a": None}}])
def test_scales_of_adapters_that_are_no_numbers(files, changes):
    edit(files["adapters"] / "adapter_config.json", **changes)
    refused(files, "adapters", "must be finite numbers")


@pytest.mark.parametrize(
    "before",
    [
        b"GGUF" + struct.pack("<I", 3),
        b"GGUF" + struct.pack("<IQ", 3, 11),
        b"tokenizer.ggml.tokens" + struct.pack("<II", 9, 8),
        b"llama.context_length" + struct.pack("<II", 4, 16),
    ],
    ids=["tensors", "metadata", "words", "length of a name"],
)
def test_counts_in_a_gguf_file_that_it_cannot_hold(files, before):
    data = files["tiny.gguf"].read_bytes()
    at = data.index(before) + len(before)
    files["tiny.gguf"].write_bytes(data[:at] + struct.pack("<Q", 2**60) + data[at + 8 :])
    refused(
        files,
        "tiny.gguf",
        "damaged, or not a GGUF file: (its header|it ends|a tensor|it has)",
    )


def test_arrays_of_numbers_without_end_in_a_gguf_file(files):
    data = files["tiny.gguf"].read_bytes()
    find = b"tokenizer.ggml.tokens" + struct.pack("<IIQ", 9, 8, 2)
    endless = b"tokenizer.ggml.tokens" + struct.pack("<IIQ", 9, 4, 2**60)
    files["tiny.gguf"].write_bytes(data.replace(find, endless))
    refused(files, "tiny.gguf", "claims 4611686018427387904 bytes beyond the end of the file")


def test_arrays_in_arrays_in_a_gguf_file(files):
    nested = struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 5000
    pair = struct.pack("<Q", 1) + b"a" + nested
    files["tiny.gguf"].write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair)
    refused(files, "tiny.gguf", "nested too deeply")


def test_tensors_of_a_gguf_file_that_overlap_or_reach_out(files):
    data = files["tiny.gguf"].read_bytes()
    name = b"output_norm.weight" + struct.pack("<IQI", 1, 16, 0)
    at = data.index(name) + len(name)
    for offset, words in ((0, "overlap"), (2**40, "damaged|beyond")):
        files["tiny.gguf"].write_bytes(data[:at] + struct.pack("<Q", offset) + data[at + 8 :])
        refused(files, "tiny.gguf", words)


def test_names_in_a_checkpoint_that_are_paths(files, tmp_path):
    file = files["unsummed"] / "state" / "_METADATA"
    file.write_text(file.read_text().replace('"key": "up"', '"key": "../../../outside"'))
    (files["unsummed"] / "state" / "manifest.ocdbt").unlink()
    refused(files, "unsummed", re.escape("names an array '../../../outside', which is a path to"))


def test_names_in_checksums_that_are_paths(files, tmp_path):
    from redcoast.checkpoint._checksums import _seal

    (tmp_path / "outside").write_text("x")
    listed = {"../../outside": [1, "8cdc1683"], "/etc/hostname": [1, "0"]}
    document = {"algorithm": "crc32c", "files": listed, "of_this": _seal(listed)}
    (files["checkpoint"] / "checksums.json").write_text(json.dumps(document))
    refused(files, "checkpoint", "outside is missing")


@pytest.mark.parametrize("change", [{"value_type": "string"}, {"skip_deserialize": True}])
def test_a_checkpoint_whose_arrays_are_said_to_be_none(files, change):
    file = files["unsummed"] / "state" / "_METADATA"
    found = json.loads(file.read_text())
    found["tree_metadata"]["('down',)"]["value_metadata"] |= change
    file.write_text(json.dumps(found))
    refused(files, "unsummed", "has no shape for down")


def test_a_checkpoint_that_claims_a_terabyte(tmp_path):
    import tensorstore as ts

    rc.save_checkpoint(tmp_path / "a", {"x": np.ones(4, np.float32)})
    (tmp_path / "a" / "checksums.json").unlink()
    metadata = tmp_path / "a" / "metadata" / "metadata"
    metadata.write_text(metadata.read_text().replace('"checksums": "crc32c", ', ""))
    store = ts.KvStore.open(f"file://{tmp_path}/a/state/|ocdbt:").result()
    spec = json.loads(store.read("x/.zarray").result().value)
    store.write("x/.zarray", json.dumps(spec | {"shape": [2**38]})).result()
    with pytest.raises(ValueError, match="claims to hold arrays of 1,099,511,627,776 bytes"):
        rc.load_checkpoint(tmp_path / "a")
    with pytest.raises(ValueError, match=r"float32\[274877906944\] in the checkpoint"):
        rc.load_checkpoint(tmp_path / "a", {"x": np.ones(4, np.float32)})


def test_a_plan_of_other_things(files):
    text = files["plan"].read_text()
    for key, value in {"mesh": {"data": 0}, "rows": [1], "compute": {"dims": "x"}}.items():
        files["plan"].write_text(json.dumps(json.loads(text) | {key: value}))
        refused(files, "plan", "not a complete plan")
