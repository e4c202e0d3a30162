"""Random numbers: known answers, witnesses in numpy, state, distribution, graphs."""

from __future__ import annotations

import math
import struct

import ml_dtypes
import numpy as np
import pytest
import torch

from tk_core import InvalidArgumentError, InvalidDtypeError, rand
from tk_core.rand import Generator
from tk_core.reference.rand.philox import philox
from tk_core.reference.rand.randn import box_muller

M32 = 0xFFFFFFFF


def _words(t: torch.Tensor) -> str:
    return " ".join(f"{v & M32:08X}" for v in t.view(torch.int32).flatten().tolist())


def _philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Philox4x32-10 in Python's integers, straight from the paper."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & M32, (a >> 32) ^ c3 ^ k1, a & M32
        k0, k1 = (k0 + 0x9E3779B9) & M32, (k1 + 0xBB67AE85) & M32
    return [c0, c1, c2, c3]


ANSWERS = [
    ((0, 0), (0, 0, 0, 0), "6627E8D5 E169C58D BC57AC4C 9B00DBD8"),
    ((M32, M32), (M32, M32, M32, M32), "408F276D 41C83B0E A20BC7C6 6D5451FD"),
    ((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), "D16CFE09 94FDCCEB 5001E420 24126EA1"),
    ((42, 0), (0, 0, 0, 0), "9CEAF053 77F5493B 12BF50AD 5742B3D7"),
    ((42, 0), (1, 0, 0, 0), "FCDB2127 53BA6CFD 838F5A6E 744E06FB"),
]


@pytest.mark.parametrize(("key", "counter", "answer"), ANSWERS)
def test_philox_known_answers(key, counter, answer):
    words = philox(tuple(torch.tensor([k]) for k in key), tuple(torch.tensor([c]) for c in counter))
    assert " ".join(f"{int(w):08X}" for w in words) == answer
    assert " ".join(f"{w:08X}" for w in _philox(key, counter)) == answer


VECTORS = [
    (42, 0, "BF785E5A 3E46ACED BF9E28CD 3FF6433E BD95E015 3E0E79FE BF8DA732 3EA7430B"),
    (0, 0, "3F7DBB2F BF6CB6B3 BF1E1BA1 BEF6D1A9"),
    (2**40 + 12345, 2**33 + 1, "3F47511F BF96132C BF46AD71 3EA7AD10"),
]


@pytest.mark.parametrize(("seed", "offset", "vector"), VECTORS)
def test_randn_vectors(seed, offset, vector):
    g = Generator().manual_seed(seed, offset)
    count = len(vector.split())
    assert _words(rand.randn(count, generator=g)) == vector
    assert g.offset() == offset + count // 4
    g.manual_seed(seed, offset)
    narrow = rand.randn(count, dtype=torch.bfloat16, generator=g)
    wide = np.array([int(w, 16) for w in vector.split()], np.uint32).view(np.float32)
    assert narrow.view(torch.int16).numpy().tobytes() == wide.astype(ml_dtypes.bfloat16).tobytes()


def _constant(word: str) -> np.float32:
    return np.float32(struct.unpack(">f", bytes.fromhex(word))[0])


def _pair_in_numpy(wa: int, wb: int) -> tuple[np.float32, np.float32]:
    """The specified sequence, one rounded fp32 operation after the other."""
    f32 = np.float32
    u = f32((wa >> 8) + 1)
    bits = int(u.view(np.int32))
    e = (bits - 0x3F3504F3) >> 23
    f = np.array(bits - (e << 23), np.int32).view(f32)[()] - f32(1)
    z = f * f
    coefficients = "3D9021BB BDEBD1B8 3DEF251A BDFE5D4F 3E11E9BF BE2AAE50 3E4CCEAC BE7FFFFC 3EAAAAAA".split()  # noqa: SIM905
    p = _constant(coefficients[0])
    for c in coefficients[1:]:
        p = f32(p * f) + _constant(c)
    y, k = f32(f32(p * f) * z), f32(e - 24)
    y = y + f32(k * _constant("B95E8083"))
    y = y - f32(f32(0.5) * z)
    log = f32(f + y)
    log = log + f32(k * _constant("3F318000"))
    r = f32(0) if log == 0 else np.sqrt(f32(f32(-2) * log))
    t = wb >> 8
    n = (t + (1 << 21)) >> 22
    x = f32(t - (n << 22)) * _constant("34C90FDB")
    q = f32(x * x)
    s = f32(_constant("B94CA1F9") * q) + _constant("3C08839E")
    s = f32(s * q) + _constant("BE2AAAA3")
    s = f32(f32(s * q) * x) + x
    c = f32(_constant("37CCF5CE") * q) + _constant("BAB6061A")
    c = f32(c * q) + _constant("3D2AAAA5")
    c = f32(f32(c * q) * q)
    c = f32(c - f32(f32(0.5) * q)) + f32(1)
    sin, cos = [(s, c), (c, -s), (-s, -c), (-c, s)][n % 4]
    return f32(r * cos), f32(r * sin)


def test_randn_equals_numpy_operation_by_operation():
    g = Generator(seed=7)
    out = rand.randn(1001, generator=g)
    expected = []
    for block in range(251):
        w = _philox((7, 0), (block, 0, 0, 0))
        expected += [*_pair_in_numpy(w[0], w[1]), *_pair_in_numpy(w[2], w[3])]
    assert out.numpy().tobytes() == np.array(expected[:1001], np.float32).tobytes()


def test_extreme_words():
    """The largest radius word gives radius +0, the smallest the largest radius; quarter turns are exact."""
    radius = torch.tensor([M32, 0, 0, 0, 0, 0])
    angle = torch.tensor([0x12345678, 0, 1 << 30, 2 << 30, 3 << 30, M32])
    z0, z1 = box_muller(radius, angle)
    expected = [_pair_in_numpy(a, b) for a, b in zip(radius.tolist(), angle.tolist())]
    assert z0.numpy().tobytes() == np.array([e[0] for e in expected]).tobytes()
    assert z1.numpy().tobytes() == np.array([e[1] for e in expected]).tobytes()
    top = math.sqrt(-2 * math.log(2.0**-24))
    assert (z0[0].item(), z1[0].item()) == (0, 0)
    assert z0[1:5].tolist() == pytest.approx([top, 0, -top, 0], abs=1e-6)
    assert z1[1:5].tolist() == pytest.approx([0, top, 0, -top], abs=1e-6)


def test_rand_takes_leading_bits_of_stream_one():
    seed, offset = 2**40 + 12345, 2**33 + 1
    g = Generator().manual_seed(seed, offset)
    out = rand.rand(11, generator=g)
    assert g.offset() == offset + 3
    words = []
    for block in range(3):
        counter = offset + block
        words += _philox((seed & M32, seed >> 32), (counter & M32, counter >> 32, 1, 0))
    assert out.tolist() == [(w >> 8) * 2.0**-24 for w in words[:11]]
    g.manual_seed(seed, offset)
    assert rand.rand(11, dtype=torch.bfloat16, generator=g).tolist() == [(w >> 24) * 2.0**-8 for w in words[:11]]


def test_numbers_do_not_depend_on_the_shape():
    whole = rand.randn(5040, generator=Generator(seed=3))
    for shape in ((5040,), (7, 720), (4, 5, 6, 42)):
        assert torch.equal(rand.randn(*shape, generator=Generator(seed=3)).flatten(), whole)
        assert torch.equal(rand.randn(shape, generator=Generator(seed=3)).flatten(), whole)
    assert torch.equal(rand.randn(5, generator=Generator(seed=3)), whole[:5])


def test_calls_of_whole_blocks_continue_one_another():
    g = Generator(seed=3)
    parts = [rand.randn(n, generator=g) for n in (4, 16, 0, 1000)]
    assert torch.equal(torch.cat(parts), rand.randn(1020, generator=Generator(seed=3)))
    assert g.offset() == 255
    rand.randn(1, generator=g)
    assert g.offset() == 256


def test_the_offset_wraps():
    g = Generator().manual_seed(5, -2)
    out = rand.randn(16, generator=g)
    assert g.offset() == 2
    assert torch.equal(out[8:], rand.randn(8, generator=Generator(seed=5)))


def test_sizes():
    g = Generator(seed=1)
    assert rand.randn(generator=g).shape == ()
    assert rand.randn((), generator=g).shape == ()
    assert rand.randn(torch.Size([2, 3]), generator=g).shape == (2, 3)
    assert rand.randn(0, 5, generator=g).shape == (0, 5)
    for size, error in (([2, 3], InvalidDtypeError), (2.0, InvalidDtypeError), (-1, InvalidArgumentError)):
        with pytest.raises(error, match="size"):
            rand.randn(size, generator=g)
    with pytest.raises(InvalidDtypeError, match="dtype must be bfloat16 or float32, got float16"):
        rand.randn(2, dtype=torch.float16)


def test_randn_like():
    x = torch.empty(6, 4, dtype=torch.bfloat16).t()
    out = rand.randn_like(x, Generator(seed=9))
    assert (out.shape, out.dtype, out.is_contiguous()) == ((4, 6), torch.bfloat16, True)
    assert torch.equal(out, rand.randn(4, 6, dtype=torch.bfloat16, generator=Generator(seed=9)))


# ---------------------------------------------------------------------- state


@pytest.fixture
def _seeded():
    rand.set_seed(1234)
    yield
    rand.set_seed(torch.initial_seed())


@pytest.mark.usefixtures("_seeded")
def test_set_seed_starts_again_and_leaves_pytorch_alone():
    before = torch.get_rng_state()
    first = rand.randn(9)
    assert not torch.equal(rand.randn(9), first)
    rand.set_seed(1234)
    assert torch.equal(rand.randn(9), first)
    assert torch.equal(first, rand.randn(9, generator=Generator(seed=1234)))
    assert torch.equal(torch.get_rng_state(), before)
    rand.set_seed(1234 + 2**64)
    assert torch.equal(rand.randn(9), first)


def test_seeds():
    assert Generator(seed=-1).initial_seed() == 2**64 - 1
    assert Generator(seed=2**63).initial_seed() == 2**63
    assert Generator().initial_seed() == torch.initial_seed()
    for bad in (1.0, "1", True):
        with pytest.raises(InvalidDtypeError, match="seed must be an int"):
            rand.set_seed(bad)
        with pytest.raises(InvalidDtypeError, match="seed must be an int"):
            Generator(seed=bad)


def test_state_can_be_saved():
    g = Generator(seed=8)
    rand.randn(10, generator=g)
    state = g.get_state()
    after = rand.randn(10, generator=g)
    other = Generator(seed=0)
    other.set_state(state)
    assert torch.equal(rand.randn(10, generator=other), after)
    assert torch.equal(rand.randn(10, generator=state), after)
    assert torch.equal(state, g.get_state())
    with pytest.raises(InvalidArgumentError, match=r"state must have shape \(2,\)"):
        g.set_state(torch.zeros(3, dtype=torch.int64))


def test_generator_of_another_device():
    with pytest.raises(InvalidArgumentError, match="device must be the device of generator"):
        rand.randn(2, device="meta", generator=Generator(seed=0))
    with pytest.raises(InvalidDtypeError, match="generator must be a tk_core"):
        rand.rand(2, generator=torch.Generator())


@pytest.mark.usefixtures("_seeded")
def test_compiled_calls_draw_new_numbers():
    """The state advances each time a compiled function runs, for the default generator and for a given one."""
    g = Generator(seed=77)

    def draw(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rand.randn(x.shape[0], 4), rand.rand(x.shape[0], generator=g)

    torch._dynamo.reset()
    compiled = torch.compile(draw, fullgraph=True, dynamic=True, backend="aot_eager")
    got = [compiled(torch.empty(n)) for n in (3, 3, 8)]
    rand.set_seed(1234)
    g.manual_seed(77)
    expected = [draw(torch.empty(n)) for n in (3, 3, 8)]
    for a, b in zip(got, expected):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    assert not torch.equal(got[0][0], got[1][0])


# ---------------------------------------------------------------------- distribution

COUNT = 1 << 20


def _ks(sorted_cdf: torch.Tensor) -> float:
    """Kolmogorov-Smirnov statistic times sqrt(n): above 1.95 with probability 0.001."""
    n = sorted_cdf.numel()
    grid = torch.arange(n, dtype=torch.float64) / n
    return math.sqrt(n) * max((sorted_cdf - grid).abs().max().item(), (sorted_cdf - grid - 1 / n).abs().max().item())


@pytest.fixture(scope="module")
def normal() -> torch.Tensor:
    return rand.randn(COUNT, generator=Generator(seed=2024)).double()


@pytest.fixture(scope="module")
def uniform() -> torch.Tensor:
    return rand.rand(COUNT, generator=Generator(seed=2024)).double()


def test_normal_moments(normal):
    """Within four standard errors: variances of the sample moments are 1, 2, 15 and 96 over n."""
    error = 4 / math.sqrt(COUNT)
    assert normal.mean().abs().item() < error
    assert (normal.square().mean() - 1).abs().item() < error * math.sqrt(2)
    assert normal.pow(3).mean().abs().item() < error * math.sqrt(15)
    assert (normal.pow(4).mean() - 3).abs().item() < error * math.sqrt(96)
    assert ((normal > 0).double().mean() - 0.5).abs().item() < error / 2
    assert normal.abs().max().item() < 5.78


def test_normal_distribution(normal):
    assert _ks(torch.special.ndtr(normal).sort().values) < 1.95


def test_uniform_distribution(uniform):
    assert uniform.min().item() >= 0
    assert uniform.max().item() < 1
    assert _ks(uniform.sort().values) < 1.95


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Sample correlation times sqrt(n)."""
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item() * math.sqrt(a.numel())


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 64, 1024])
def test_lags_do_not_correlate(normal, uniform, lag):
    assert abs(_correlation(normal[lag:], normal[:-lag])) < 4.5
    assert abs(_correlation(normal[lag:].square(), normal[:-lag].square())) < 4.5
    assert abs(_correlation(uniform[lag:], uniform[:-lag])) < 4.5


def test_streams_do_not_correlate(normal, uniform):
    assert abs(_correlation(normal, uniform)) < 4.5
    for seed in (2025, 2024 + (1 << 32), 0):
        other = rand.randn(COUNT, generator=Generator(seed=seed)).double()
        assert abs(_correlation(normal, other)) < 4.5


def test_default_generators_outlive_the_mode_that_made_them(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tk_core.rand import generator

    monkeypatch.setattr(generator, "_defaults", {})
    with FakeTensorMode():
        rand.rand(3)
    assert type(rand.rand(3)) is torch.Tensor
    monkeypatch.setattr(generator, "_defaults", {})
    with torch.inference_mode():
        first = rand.rand(3)
    assert not torch.equal(first, rand.rand(3))


@pytest.mark.parametrize("device", ["nowhere", 3.5, True, "cuda:99"])
def test_a_device_that_cannot_be_used_is_named(device):
    with pytest.raises((InvalidArgumentError, InvalidDtypeError), match="device must be"):
        rand.rand(3, device=device)


def test_a_device_that_was_used_needs_no_tensor_to_be_found_again(monkeypatch):
    from tk_core.rand import generator

    made = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(a) or empty(*a, **k))
    monkeypatch.setattr(generator, "_usable", set())
    for device in ("cpu", torch.device("cpu")):
        assert generator.usable_device("op", device) == torch.device("cpu")
    assert len(made) == 1


def test_a_type_of_device_stands_for_the_current_one(monkeypatch):
    from tk_core.rand import generator

    current = [1]
    monkeypatch.setattr(generator, "_current", {"cuda": lambda: current[0]})
    monkeypatch.setattr(generator, "_usable", {torch.device("cuda", 0), torch.device("cuda", 1)})
    assert generator.usable_device("op", "cuda") == torch.device("cuda", 1)
    current[0] = 0
    assert generator.usable_device("op", torch.device("cuda")) == torch.device("cuda", 0)


def test_a_fake_device_is_not_remembered_as_a_usable_one():
    from torch._subclasses import FakeTensorMode

    from tk_core.rand import generator

    before = set(generator._usable)
    with FakeTensorMode():
        assert generator.usable_device("op", "cuda:3").type == "cuda"
    assert generator._usable == before
