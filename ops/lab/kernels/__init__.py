"""Time every kernel next to torch's own operations: ``python -m penstock.ops.lab.kernels``.

The rows of ``kernels/<op>`` come from the module ``cases/<op>.py``, which has one function, found by its name:

    def cases(setting: Setting) -> Iterator[Case]:
        for num_tokens in setting.choose(on_gpu=[1, 64, 8192], on_cpu=[16]):
            inputs, weight = setting.random(num_tokens, 4096), setting.random(4096)
            yield Case(
                shape=f"T={num_tokens} E=4096",
                dtype=inputs.dtype,
                inputs=(inputs, weight),
                run=lambda inputs, weight: rms_norm(inputs, weight, 1e-6),
                truth=lambda inputs, weight: reference.rms_norm(inputs, weight, 1e-6),
                rivals={
                    "F.rms_norm": lambda inputs, weight: F.rms_norm(inputs, weight.shape, weight, 1e-6),
                    **setting.compiled(lambda inputs, weight: reference.rms_norm(inputs, weight, 1e-6)),
                },
                num_bytes=2 * inputs.nbytes + weight.nbytes,
            )

``run`` calls the kernel's wrapper, so a row times the implementation that this device runs: Triton on a GPU, C++ or
the reference on a CPU. Before anything is timed, the results of the kernel and of each rival are compared with
``truth`` of the same inputs in float64, by the tolerances of ``tolerances.py``. A function that fails the comparison
or raises has an error in its row instead of a time.

``cases/__init__.py`` documents the fields of a case, ``timing.py`` how time is measured, and ``roofline.py`` the rate
that "share" refers to. The table is for reading, ``--json FILE`` for keeping.
"""
