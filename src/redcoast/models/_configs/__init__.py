"""What the models are made by: a family a file."""
