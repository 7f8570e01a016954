"""The measurements that users run: edits beside dense runs, and the validation of a model."""
