"""The proof can pass, can fail, and says where."""
from __future__ import annotations

import json

import pytest
import torch

from vime import ops
from vime.ops import prove, stock
from vime.ops.prove_types import CaseResult, ProofReport, Timing, differing_rows


def test_quick_proof_finds_nothing(dtype):
    report = prove.run("cpu", [dtype], ops=["linear", "activation", "attention"], quick=True)
    assert report.differing_rows == 0 and report.rows_compared == report.rows_expected > 2000
    assert {c.op for c in report.cases} == {"linear", "activation", "attention"}
    assert all(c.error < (1e-6 if dtype is torch.float32 else 5e-3) for c in report.cases)
    assert json.loads(json.dumps(report.to_dict()))["first_bad"] is None


def test_a_processor_without_a_product_of_onednn_has_one_route_less(monkeypatch):
    class Kernels:
        @staticmethod
        def create_onednn_mm_handler(weight, size):
            raise RuntimeError("could not create a primitive descriptor for the matmul primitive")

    monkeypatch.setattr(stock, "vllm_kernels", lambda: Kernels)
    weight, x = torch.randn(8, 16), torch.randn(3, 16)
    routes = stock.linear(weight)
    assert list(routes) == ["torch linear"] and torch.equal(routes["torch linear"](x), torch.nn.functional.linear(x, weight))


def test_stock_attention_differs():
    report = prove.run("cpu", [torch.float32], ops=["attention"], quick=True, subject="stock")
    assert report.differing_rows > 0 and report.first_bad["op"] == "attention"


def test_a_planted_fault_is_found_at_its_place(monkeypatch):
    honest = ops.linear

    def faulty(x, weight, bias=None):  # the second row changes by one unit in the last place in batches of 7
        y = honest(x, weight, bias)
        if len(x) == 7:
            y[1] = torch.nextafter(y[1], torch.tensor(float("inf")))
        return y

    monkeypatch.setattr(ops, "linear", faulty)
    report = prove.run("cpu", [torch.float32], ops=["linear"], quick=True)
    assert report.first_bad is not None
    assert report.first_bad["rows"] == 7 and report.first_bad["row"] == 1
    assert all(c.differing_rows == 1 for c in report.cases)


def test_comparison_is_of_bits():
    a = torch.tensor([[0.0], [1.0], [float("nan")]])
    b = torch.tensor([[-0.0], [1.0], [float("nan")]])
    assert differing_rows(a, b).tolist() == [True, False, True]
    with pytest.raises(ValueError, match="compared"):
        differing_rows(a, b.double())


def test_ratios():
    report = ProofReport("cpu", "vime", False, [1], "here")
    for function, ratios in (("linear", (2.0, 0.5)), ("sample", (4.0,))):
        case = CaseResult("x", function, "float32", "s", "i")
        case.timings = [Timing("1", 1.0, 1.0, r, "stock", 5) for r in ratios]
        report.cases.append(case)
    assert report.op_ratio == {"float32": {"linear": pytest.approx(1), "sample": pytest.approx(4)}}
    assert report.geomean_ratio == {"float32": pytest.approx(2)}


def test_unknown_operation_is_named():
    with pytest.raises(ValueError, match="cannot prove 'lineal'; operations: embedding"):
        prove.run("cpu", ops=["lineal"])


@pytest.mark.parametrize(("dtype", "error", "fails"), [("float32", 3e-7, False), ("float32", 3e-4, True), ("float32", float("nan"), True), ("float32", None, False),
                                                       ("bfloat16", 3e-3, False), ("bfloat16", 0.03, True)])
def test_a_wrong_number_fails_the_proof_though_no_row_sees_another(dtype, error, fails):
    """As a product of inputs that were rounded to TF32; stock kernels in the place of ours are asked about rows only."""
    from alignment.verdict import Status
    from vime.commands.prove import verdict_of

    case = CaseResult("linear", "linear", dtype, "N=4 K=4", "x@1", rows_expected=2, rows_compared=2, error=error)
    report = ProofReport("cpu", "vime", True, 2, "")
    report.cases.append(case)
    found = verdict_of(report)
    assert found.status is (Status.FAIL if fails else Status.PASS) and ("against float64" in found.children[0].reason) == fails
    report.subject = "stock"
    assert verdict_of(report).status is Status.PASS
