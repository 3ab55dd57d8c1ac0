"""What the tests of `--layout genai` share: conversions in memory and on disk, and the runtime that proves them."""

import json
from pathlib import Path
from typing import Any

import onnx

from kvdoctor.addons.conversions import pipeline
from kvdoctor.addons.conversions.convert_layout import convert_layouts, refuse_impossible_layout
from kvdoctor.addons.conversions.layout_proof import NEEDS, SCRIPT
from kvdoctor.addons.conversions.layouts.registry import ConvertedModels
from kvdoctor.addons.conversions.options import ConvertChoices
from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.contract import CacheContract
from kvdoctor.options import Options
from kvdoctor.report.document import Report
from kvdoctor.runtime.environments import EnvironmentUnavailable, ScriptProcess
from support.isolated import give_up

GENAI = ConvertChoices(layout="genai")


def convert(folder: Path, request: ConvertChoices = GENAI) -> ConvertedModels:
    """The models and the configuration of a folder in the new layout, in memory."""
    refuse_impossible_layout(str(folder), request)
    opened = open_folder(str(folder))
    contracts: dict[str, CacheContract | None] = {
        stack.name: read_contract(stack, opened.side_cars) for stack in opened.stacks
    }
    (one,) = convert_layouts(opened, contracts, request)
    return one.made


def config_of(made: ConvertedModels) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(made.texts["genai_config.json"])
    return found


def ports(model: onnx.ModelProto) -> tuple[set[str], set[str]]:
    return {value.name for value in model.graph.input}, {value.name for value in model.graph.output}


def named(entries: dict[str, str], layers: int) -> set[str]:
    """The names that a part of the configuration stands for."""
    return {name.replace("%d", str(layer)) for name in entries.values() for layer in range(layers)}


def re_export(folder: Path, out: Path, offline: bool = False) -> Report:
    return pipeline.convert(pipeline.ConvertRequest(str(folder), str(out), GENAI, ()), Options(offline=offline))


def require_runtime() -> None:
    """Makes an environment with onnxruntime-genai; without one the test is skipped."""
    script = ScriptProcess(SCRIPT, {"model": "", "prompts": [], "counts": [], "out": ""}, NEEDS, False)
    try:
        script.ask({})
    except EnvironmentUnavailable as reason:
        give_up(str(reason))
    except Exception:  # noqa: S110 - it ran, and refused the empty path
        pass
    finally:
        script.stop()
