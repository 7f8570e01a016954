"""`fisedit bench quality`: edits whose truth is known, made by us and by others, measured alike.

`edits` and `prompts` say what is asked, `case` holds a source and its dense reference, `methods` lists who edits,
`metrics` and `scores` measure, `report` tells, `pie` reads a dataset of a user's own, and `run` joins them.
"""
