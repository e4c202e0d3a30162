"""Process-wide settings. Public functions read them at call time and pass them to operators as arguments; backends read
the launch settings (PDL, number of SMs) when they launch.
"""

from __future__ import annotations

from . import checks

_TOKEN_ALIGNMENT = 128
_MOST = 2**31 - 1

_token_alignment = _TOKEN_ALIGNMENT
_pdl = False
_num_sms = 0
_deterministic = True


def set_token_alignment(token_alignment: int) -> None:
    """Set the multiple to which the first row of each expert is aligned in buffers grouped by expert.

    Args:
        token_alignment: rows, from 1 to 2**31 - 1; 128 by default. Operators that take
            ``psum_num_tokens_per_expert`` use it.

    Raises:
        InvalidArgumentError: outside of that.
        InvalidDtypeError: not an int.
    """
    global _token_alignment
    checks.at_least("set_token_alignment", "token_alignment", token_alignment, 1)
    checks.at_most("set_token_alignment", "token_alignment", token_alignment, _MOST)
    _token_alignment = token_alignment
    _forget_plans()


def get_token_alignment() -> int:
    """The multiple to which the first row of each expert is aligned."""
    return _token_alignment


def set_pdl(use_pdl: bool) -> None:
    """Turn programmatic dependent launch of CUDA kernels (sm_90 and newer) on or off; off by default.

    Kernels then wait for the kernel before them, not for its last block to retire, before they read anything that it
    may have written, caches and positions included. Other devices ignore the setting.

    Raises:
        InvalidDtypeError: not a bool.
    """
    global _pdl
    checks.is_bool("set_pdl", "use_pdl", use_pdl)
    _pdl = use_pdl
    _forget_plans()


def get_pdl() -> bool:
    """Whether CUDA kernels are launched with programmatic dependent launch."""
    return _pdl


def set_num_sms(num_sms: int) -> None:
    """Limit the multiprocessors (on Ascend, the AI cores) that persistent kernels occupy. Results do not depend on it.

    Args:
        num_sms: how many, up to 2**31 - 1; 0, the default, means all of the device. More than the device has means all.

    Raises:
        InvalidArgumentError: negative, or more than that.
        InvalidDtypeError: not an int.
    """
    global _num_sms
    checks.at_least("set_num_sms", "num_sms", num_sms, 0)
    checks.at_most("set_num_sms", "num_sms", num_sms, _MOST)
    _num_sms = num_sms
    _forget_plans()


def get_num_sms() -> int:
    """The limit that ``set_num_sms`` set; 0 means all of the device."""
    return _num_sms


def use_deterministic_algorithms(enabled: bool) -> None:
    """Ask for results that are equal from run to run. They always are: no operator has a faster, varying form.

    The setting exists so that code which asks for determinism can read back what it asked for; turning it off changes
    no result.

    Raises:
        InvalidDtypeError: not a bool.
    """
    global _deterministic
    checks.is_bool("use_deterministic_algorithms", "enabled", enabled)
    _deterministic = enabled


def get_deterministic_algorithms() -> bool:
    """What ``use_deterministic_algorithms`` was last told; True by default."""
    return _deterministic


def reset_runtime_config() -> None:
    """Restore every setting, the amax floors of the quantizers included, to its default."""
    from .quant.amax_clamp import reset_amax_clamp_for_quant

    global _token_alignment, _pdl, _num_sms, _deterministic
    _token_alignment, _pdl, _num_sms, _deterministic = _TOKEN_ALIGNMENT, False, 0, True
    reset_amax_clamp_for_quant()
    _forget_plans()


def _forget_plans() -> None:
    """Settings are no part of a call's signature."""
    from .op import forget_plans

    forget_plans()
