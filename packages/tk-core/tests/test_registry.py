"""Backends as installed distributions: good ones serve, each kind of broken one is caught and says why."""

from __future__ import annotations

import pytest

GOOD = """
    from tk_core.backend import CONTRACT, Layout

    class Backend:
        name = "acme"
        device_type = "meta_acme"
        contract = CONTRACT
        layout = Layout()
        version = "1.0"

        def applies(self):
            return True

        def unavailable(self):
            return None

        def kernel(self, op):
            return None

    BACKEND = Backend()
"""

CPU_KERNEL = """
    import torch
    from tk_core.backend import CONTRACT, Layout
    from tk_core.registry import ReferenceBackend
    from tk_core.op import OPERATORS

    class Kernel:
        def __init__(self, op):
            self.reference = ReferenceBackend().kernel(op)
            self.revision = OPERATORS[op].revision + {stale}

        def refusal(self, *args):
            return {refusal!r}

        def __call__(self, outs, *args):
            from tk_core.backend import Refused
            if self.refusal(*args):
                raise Refused(self.refusal(*args))
            {body}

    class Backend:
        name = "acme"
        device_type = "cpu"
        contract = CONTRACT
        layout = Layout()
        version = "1.0"

        def applies(self):
            return True

        def unavailable(self):
            return None

        def kernel(self, op):
            return Kernel(op)

    BACKEND = Backend()
"""

CHECK = """
    from tk_core.cases import Sample, call
    from tk_core.conformance import engine
    from tk_core import backends
    import torch
    sample = Sample("plain", lambda m: call(m.randn(3, 256, dtype=torch.bfloat16), "e4m3", 128))
    backend = backends.found()["acme"]
    outcome = engine.Check("quant.per_token_cast", sample, backend).run()
    print(outcome.status, outcome.problems, outcome.refusal)
"""


def kernel_backend(body: str = "self.reference(outs, *args)", stale: int = 0, refusal: str | None = None) -> str:
    return CPU_KERNEL.format(body=body, stale=stale, refusal=refusal)


def test_good_backend_is_found(distribution, python):
    distribution("acme", GOOD)
    done = python("import tk_core; print('acme' in tk_core.backends.found(), tk_core.backends.chosen('meta_acme'))")
    assert done.stdout.strip() == "True ['acme']", done.stderr


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('half an install')", "raised RuntimeError: half an install"),
        (GOOD.replace("contract = CONTRACT", "contract = (9, 0)"), "it speaks contract 9.0, this tk-core 1.0"),
        (GOOD.replace("contract = CONTRACT", "contract = (1, 7)"), "it speaks contract 1.7, this tk-core 1.0"),
        (GOOD.replace('name = "acme"', 'name = "other"'), "the backend calls itself 'other'"),
        (GOOD.replace("layout = Layout()", "layout = (4, 16)"), "its layout must be a tk_core.backend.Layout"),
        (GOOD.replace("def unavailable", "def missing"), "it lacks unavailable"),
        (GOOD.replace("return True", "return False", 1), "does not support its devices (meta_acme)"),
    ],
    ids=[
        "raises on import",
        "wrong major",
        "newer minor",
        "wrong name",
        "wrong layout",
        "lacks a method",
        "other torch",
    ],
)
def test_broken_backend_is_rejected_with_its_reason(distribution, python, source, reason):
    distribution("acme", source)
    done = python(
        """
        import tk_core, torch
        print([r for r in tk_core.backends.rejected() if r.name == "acme"])
        try:
            with tk_core.use_backend("acme"):
                pass
        except tk_core.NoBackendError as error:
            print("asked:", error)
        q, sf = tk_core.quant.per_token_cast(torch.ones(2, 128), "e4m3", 128)
        print("core works:", sf.shape)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(reason) == 2
    assert "core works: torch.Size([2, 1])" in done.stdout


def test_two_claimants_of_a_device_need_a_choice(distribution, python):
    distribution("acme", GOOD)
    distribution("bolt", GOOD.replace('"acme"', '"bolt"', 1))
    code = """
        import tk_core
        from tk_core import backends
        try:
            print([b.name for b in backends._claimants("meta_acme")])
        except tk_core.AmbiguousBackendError as error:
            print(error)
        """
    done = python(code)
    assert "acme and bolt both serve device type 'meta_acme'; choose with tk_core.use_backend('acme')" in done.stdout
    assert python(code, TK_BACKENDS="bolt").stdout.strip() == "['bolt']"


def test_restricting_to_an_absent_backend_is_visible(python):
    done = python("import tk_core; print(tk_core.backends.rejected())", TK_BACKENDS="nowhere")
    assert "no installed package provides it" in done.stdout


def test_stale_kernel_counts_as_missing(distribution, python):
    distribution("acme", kernel_backend(stale=1))
    done = python(
        """
        import tk_core, torch
        try:
            with tk_core.use_backend("acme"):
                tk_core.quant.per_token_cast(torch.ones(2, 128), "e4m3", 128)
        except tk_core.UnsupportedError as error:
            print(error)
        """
    )
    assert "acme: stale: its kernel implements revision 2, tk-core needs 1" in done.stdout


def test_conformance_passes_a_good_kernel(distribution, python):
    distribution("acme", kernel_backend())
    assert python(CHECK).stdout.startswith("passed [] ")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (kernel_backend("self.reference(outs, *args); outs[0].view(torch.uint8)[-1, -1] = 0xFF"), "elements differ"),
        (
            kernel_backend(
                "old = outs[0].view(torch.uint8)[0, 0].item(); self.reference(outs, *args); outs[1][-1:] = old"
            ),
            "a second run differs",
        ),
        (
            kernel_backend(
                "self.reference(outs, *args); "
                "outs[0].view(torch.uint8).as_strided((1,), (1,), outs[0].storage_offset() + outs[0].numel()).fill_(1)"
            ),
            "wrote 1 bytes after result[0]",
        ),
        (kernel_backend("self.reference(outs, *args); args[0].zero_()"), "input tensor 0 was modified"),
        (kernel_backend("raise RuntimeError('launch failed')"), "RuntimeError: launch failed"),
    ],
    ids=["writes too little", "leaves memory as it was", "writes too much", "writes its input", "raises"],
)
def test_conformance_catches(distribution, python, source, problem):
    distribution("acme", source)
    done = python(CHECK)
    assert done.stdout.startswith("failed"), done.stdout + done.stderr
    assert problem in done.stdout


def test_refusal_is_a_claim_with_its_sentence(distribution, python):
    distribution("acme", kernel_backend(refusal="needs num_per_channels = 32"))
    assert python(CHECK).stdout.strip() == "refused [] needs num_per_channels = 32"


def test_refusal_after_writing_is_a_fault(distribution, python):
    body = "self.reference(outs, *args); raise Refused('too late')"
    distribution("acme", kernel_backend(body).replace("if self.refusal(*args):", "if False:"))
    done = python(CHECK)
    assert "refused the call after writing results" in done.stdout


def test_fallback_only_on_request_and_counted(distribution, python):
    distribution("acme", kernel_backend(refusal="not today"))
    done = python(
        """
        import warnings
        import tk_core, torch
        x = torch.ones(2, 128)
        try:
            with tk_core.use_backend("acme"):
                tk_core.quant.per_token_cast(x, "e4m3", 128)
        except tk_core.UnsupportedError as error:
            print("raised:", "acme: not today" in str(error), "x=float32(2, 128)" in str(error))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with tk_core.use_backend("acme", fallback="reference"):
                tk_core.quant.per_token_cast(x, "e4m3", 128)
                tk_core.quant.per_token_cast(x, "e4m3", 128)
        print("warned:", len(caught), "report:", tk_core.backends.report())
        """
    )
    assert "raised: True True" in done.stdout, done.stderr
    assert "warned: 1 report: {'quant.per_token_cast: acme: not today': 2}" in done.stdout


def test_device_without_backend_names_the_package(python):
    done = python(
        """
        import tk_core
        from tk_core import backends
        for device in ("npu", "xpu"):
            try:
                backends._claimants(device)
            except tk_core.NoBackendError as error:
                print(error)
        """,
        TK_BACKENDS="reference",
    )
    assert "pip install './packages/tk-ascend[npu]'" in done.stdout
    assert "no backend serves device type 'xpu'" in done.stdout


def test_unknown_backend_lists_what_is_there(python):
    done = python("import tk_core\nwith tk_core.use_backend('nope'): pass", TK_BACKENDS="reference")
    assert "backend 'nope' is not installed; installed: reference" in done.stderr
    assert done.returncode == 1


def test_import_costs_little_and_loads_no_compiler(python):
    done = python(
        """
        import sys, time, torch
        start = time.process_time()
        import tk_core
        cost = time.process_time() - start
        print(cost, "tilelang" in sys.modules, "tvm" in sys.modules, torch.cuda.is_initialized())
        """
    )
    cost, *rest = done.stdout.split()
    assert rest == ["False", "False", "False"], done.stderr
    assert float(cost) < 0.3  # 0.15 s of an idle machine; other tests share its caches and clocks


def test_the_tk_core_under_test_is_ours():
    import importlib.metadata

    import tk_core

    assert tk_core.__version__ == importlib.metadata.version("tk-core") == "2.0.0.dev0"
    assert hasattr(tk_core, "use_backend")
