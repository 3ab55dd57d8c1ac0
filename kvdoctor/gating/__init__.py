"""The gate: diagnoses many models under one policy and gives one verdict with an exit code.

- `plan`: the models, options and settings of a gate. `jobs`: a model with its options; the settings of a run.
- `run`: `gate`, the order in which the models run, and the cores and memory that may be used.
- `diagnose_job`: the diagnosis of one model, and the reports of models that could not be diagnosed.
- `process_pool`, `cluster`: executors, local and on Dask.
- `cache`, `cache_key`: reports of models that have not changed.
- `baseline`: known findings. `verdict`: the result of a gate. `policy`: the policy file.

Commands import from these modules. The package itself imports none of them: every command reads the policy, and only a
gate needs the rest. It must not import `reproducer`, `comparison` or `cli`, and it prints nothing.
"""
