"""Runtime settings: defaults, validation, effect."""

from __future__ import annotations

import pytest
import torch

from tk_core import InvalidArgumentError, InvalidDtypeError, config
from tk_core.quant import get_amax_clamp_for_quant, set_amax_clamp_for_quant, swiglu_forward


@pytest.fixture(autouse=True)
def _defaults():
    config.reset_runtime_config()
    yield
    config.reset_runtime_config()


def test_defaults():
    assert config.get_token_alignment() == 128
    assert config.get_pdl() is False
    assert config.get_num_sms() == 0
    assert config.get_deterministic_algorithms() is True


def test_settings_are_read_back_and_reset():
    config.set_token_alignment(16)
    config.set_pdl(True)
    config.set_num_sms(78)
    config.use_deterministic_algorithms(False)
    set_amax_clamp_for_quant("e4m3", False, 0.5)
    assert (config.get_token_alignment(), config.get_pdl(), config.get_num_sms()) == (16, True, 78)
    assert config.get_deterministic_algorithms() is False
    config.reset_runtime_config()
    test_defaults()
    assert get_amax_clamp_for_quant("e4m3", False) == 1e-4


@pytest.mark.parametrize("value", [0, -4])
def test_alignment_must_be_positive(value):
    with pytest.raises(InvalidArgumentError, match="token_alignment must be at least 1"):
        config.set_token_alignment(value)


@pytest.mark.parametrize("setter", [config.set_token_alignment, config.set_num_sms])
@pytest.mark.parametrize("value", [1.0, "1", True, None])
def test_numbers_must_be_ints(setter, value):
    with pytest.raises(InvalidDtypeError, match="must be an int"):
        setter(value)


@pytest.mark.parametrize("setter", [config.set_pdl, config.use_deterministic_algorithms])
@pytest.mark.parametrize("value", [0, 1, None])
def test_switches_must_be_bools(setter, value):
    with pytest.raises(InvalidDtypeError, match="must be a bool"):
        setter(value)


def test_a_negative_limit_is_refused():
    with pytest.raises(InvalidArgumentError, match="num_sms must be at least 0, got -1"):
        config.set_num_sms(-1)


def _valid_rows(**options) -> int:
    count = torch.zeros(4, dtype=torch.int64)
    psum = torch.tensor([3, 9], dtype=torch.int32)
    swiglu_forward(torch.ones(12, 2), "fp32", psum, clamp_value=1.0, clamped_count=count, **options)
    return int(count[3])


def test_alignment_says_where_experts_start():
    """Ends 3 and 9: the second expert starts at row 128, 8 or 3."""
    assert _valid_rows() == 3
    config.set_token_alignment(8)
    assert _valid_rows() == 3 + 1
    assert _valid_rows(token_alignment=1) == 9


def test_a_compiled_call_follows_the_setting():
    def rows() -> torch.Tensor:
        psum = torch.tensor([3, 9], dtype=torch.int32)
        return swiglu_forward(torch.ones(12, 2), "fp32", psum)

    torch._dynamo.reset()
    compiled = torch.compile(rows, fullgraph=True, backend="eager")
    for alignment, valid in ((1, 9), (8, 4)):
        config.set_token_alignment(alignment)
        assert int((compiled() != 0).sum()) == valid


@pytest.mark.parametrize("bad", [None, "a", True, 1e39, -1.0, float("nan"), 2**2000])
def test_amax_clamps_outside_of_float32_are_refused(bad):
    before = get_amax_clamp_for_quant("e4m3", False)
    with pytest.raises((InvalidArgumentError, InvalidDtypeError), match="clamp_min_value must be"):
        set_amax_clamp_for_quant("e4m3", False, bad)
    assert get_amax_clamp_for_quant("e4m3", False) == before


def test_settings_that_no_device_can_hold_are_refused():
    with pytest.raises(InvalidArgumentError, match="num_sms must be at most"):
        config.set_num_sms(2**40)
    with pytest.raises(InvalidArgumentError, match="token_alignment must be at most"):
        config.set_token_alignment(2**40)
