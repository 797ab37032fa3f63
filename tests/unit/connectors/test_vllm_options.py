"""What users of the vLLM plugin set."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.vllm.options import fingerprint_model, read_options
from core.errors import ConfigError


def test_options_of_the_plugin_are_its_own_and_the_rest_are_the_connectors() -> None:
    given = {"connector": "nvme", "path": "/kv", "num_threads": 2, "staging_bytes": "64MiB", "save_output_blocks": False}
    options, rest = read_options(given)
    assert (options.connector, options.staging_bytes, options.save_output_blocks) == ("nvme", 64 * 1024 * 1024, False)
    assert rest == {"path": "/kv", "num_threads": 2}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "connector"),
        ({"connector": "nvme", "load_timeout_s": 0}, "load_timeout_s"),
        ({"connector": "nvme", "save_timeout_s": "soon"}, "save_timeout_s"),
        ({"connector": "nvme", "staging_bytes": "much"}, "staging_bytes"),
    ],
)
def test_options_outside_what_is_allowed_are_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"kv_connector_extra_config\.{field}"):
        read_options(given)


def test_model_is_named_by_content_dtype_and_quantization_or_by_the_name_given(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")

    def fingerprint(name: str = "", load_format: str = "auto", **changes: Any) -> bytes:
        config = SimpleNamespace(to_dict=lambda: {"hidden_size": 64})
        model = {"model": str(tmp_path), "dtype": "float32", "quantization": None, "hf_config": config, **changes}
        return fingerprint_model(SimpleNamespace(**model), SimpleNamespace(load_format=load_format), name)

    different = [fingerprint(), fingerprint(dtype="bfloat16"), fingerprint(quantization="fp8"), fingerprint("mine")]
    assert len(set(different)) == 4
    assert fingerprint(load_format="safetensors") == different[0]
    assert fingerprint("mine", load_format="dummy", model="org/name") == different[3]
    with pytest.raises(ConfigError, match="load_format"):
        fingerprint(load_format="dummy")
