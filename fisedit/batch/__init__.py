"""`fisedit batch`: edits a folder of images; a run can be killed at any time and continued."""
