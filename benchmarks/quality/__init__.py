"""`python -m benchmarks.quality` and `benchmarks.masks`: edits of known truth, by this engine and by published methods.

`scene_edits`, `reference_edits`, `global_edit_prompts` and `pie_bench` give the edits; `edit_case` holds a source and
its dense reference; `methods` lists the methods, with `baselines`, `diffusers_baselines` and `prompt_to_prompt`;
`metrics`, `artefacts` beside a `drawn_truth` and `scores` measure; `tables` and `html_report` format; `edit_quality`,
`mask_quality` and `reference_quality` run it all.
"""
