"""Times every kernel beside torch's own operations: ``python -m penstock.kernels.bench``.

A kernel comes in by a file ``kernels/<op>/cases.py`` with one function, found by its name:

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

``run`` calls the kernel's wrapper, so the row is of what this device runs: Triton on a GPU, C++ or the reference on a
CPU. Before it is timed its result is compared with ``truth`` of the same inputs in float64, by the one table of
tolerances; so is each rival's. What fails the comparison, or raises, is told in its row and has no time.

``Case`` (``case.py``) says what each field means, ``timing.py`` how time is taken, ``roofline.py`` what "share" is a
share of. The table is for people, ``--json FILE`` for keeping.
"""
