"""`fisedit batch`: a folder of pictures edited as one job that can be killed anywhere and taken up again."""
