"""The kernels are usable on their own."""

import pathlib
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).parents[2]
OF_THE_KERNELS = {"jax", "jaxtyping", "ml_dtypes", "numpy"}  # jax itself needs the last two
PROGRAM = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise AssertionError(f"{name} is not to be needed")

sys.meta_path.insert(0, Blocker())
import jax.numpy as jnp
import pallas_kernels as pk

pool = pk.KVPages(jnp.zeros((3, 4, 8)), jnp.zeros((3, 8, 4)), jnp.full((3, 4), -jnp.inf),
                  jnp.full((3, 4), -1, jnp.int32))
one, head = jnp.ones((1, 1, 1), jnp.int32), jnp.ones((1, 1, 1, 8))
pool = pk.write_slots(pool, one, one, head, 2 * head, jnp.zeros((1, 1), jnp.int32))
out, lse = pk.paged_attention(jnp.ones((1, 2, 8)), [pool], [one], scale=0.5)
assert (out == 2).all() and (lse == 4).all(), (out, lse)
"""


def test_needs_only_jax_and_jaxtyping():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {need.partition(">")[0].replace("pyyaml", "yaml").replace("-", "_") for need in needed}
    assert names >= OF_THE_KERNELS | {"flax", "transformers", "orbax_checkpoint"}
    refused = (names | {"kvjax", "orbax"}) - OF_THE_KERNELS - {"scipy", "setuptools"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *refused], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
