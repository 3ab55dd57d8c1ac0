"""What users of decoders ask a tool for, whether kvdoctor does it, and the run that shows it. Data.

A command is written as a user types it, from the root of the repository. `TEXT/NAME` is fixtures/text/NAME.onnxtxt,
compiled, and `OUT` a folder that is not there yet. `python -m evidence.features.make_page --run` runs all of them.
"""

from dataclasses import dataclass
from typing import Any, Literal

Answer = Literal["yes", "partly", "no"]
GPT2, MARIAN, BY_HAND = "fixtures/exports/gpt2", "fixtures/exports/marian-4.46.3", "fixtures/from_scratch"


@dataclass(frozen=True)
class Shown:
    """A command and what its output must hold.

    Attributes:
        command: The arguments of kvdoctor.
        text: What must stand in the output, or in `file`.
        at: A path into the JSON report, such as `stacks.0.layout`; `runs[chunk].outcome` is the first run of that
            experiment. The value there must be `value`. `--format json` is added to the command.
        value: The value at `at`.
        file: A file that the command writes, below OUT.
        code: The exit code.
    """

    command: str
    text: str = ""
    at: str = ""
    value: Any = None
    file: str = ""
    code: int = 0

    def words(self) -> str:
        """What is looked for."""
        if self.at:
            return f"{self.at} = {self.value}"
        return f"{self.file}: {self.text}" if self.file else self.text


@dataclass(frozen=True)
class Tested:
    """A test of this repository that shows it, where one command cannot."""

    __test__ = False  # pytest takes its name for that of a test

    file: str
    name: str


@dataclass(frozen=True)
class Held:
    """A file of this repository that is what was asked for, and a line of it."""

    file: str
    text: str


@dataclass(frozen=True)
class Feature:
    """One thing that is asked for.

    Attributes:
        words: What it is.
        answer: Whether kvdoctor does it.
        evidence: What shows it; nothing for a `no`.
        missing: What is missing, for all but a `yes`.
    """

    words: str
    answer: Answer
    evidence: tuple[Shown | Tested | Held, ...] = ()
    missing: str = ""


def yes(words: str, *evidence: Shown | Tested | Held) -> Feature:
    """A feature that is there."""
    return Feature(words, "yes", evidence)


def partly(words: str, missing: str, *evidence: Shown | Tested | Held) -> Feature:
    """A feature of which something is missing."""
    return Feature(words, "partly", evidence, missing)


def no(words: str, missing: str) -> Feature:
    """A feature that is not there."""
    return Feature(words, "no", (), missing)


READING = (
    yes(
        "Print inputs and outputs with element types and named axes",
        Shown(f"inspect {GPT2} -v", "past_key_values.0.key and 3 more  float[batch_size, 4, past_sequence_length, 8]"),
    ),
    yes("Give the same as JSON", Shown(f"inspect {GPT2}", at="model.files.0.inputs.0.name", value="input_ids")),
    yes(
        "Name IR version, opset of each domain and exporter together",
        Shown(f"inspect {GPT2}", "IR 8; opset ai.onnx 18; pytorch 2.13.0"),
    ),
    yes(
        "Pair the past and present of each layer in an unknown file, with heads and widths",
        Shown(f"contract {BY_HAND}/right-anonymous.onnx", "k -> x1; v -> x2; k.3 -> x3; v.3 -> x4"),
    ),
    yes(
        "Name the kind of cache: merged, pair, shared, static, hybrid, ...",
        Shown(f"inspect {MARIAN}", at="stacks.0.layout", value="optimum-merged", code=1),
        Shown("inspect TEXT/layout-hybrid-conv-healthy", at="stacks.0.layout", value="optimum-decoder-only-hybrid"),
        Shown("inspect TEXT/layout-tensor-scatter-healthy", at="stacks.0.layout", value="mobius-decoder-only-static"),
    ),
    yes(
        "Say how lengths depend on each other",
        Shown(f"contract {GPT2}", "total = past_sequence_length + sequence_length"),
    ),
    yes(
        "Tell the bytes of the cache per token and at the full context",
        Shown(f"inspect {GPT2}", "512 B per token; 32.0 KiB at the context of 64 tokens"),
    ),
    yes(
        "Read files with external weights without loading these",
        Tested("tests/test_skeleton.py", "test_payloads_are_not_read"),
    ),
    yes(
        "Look into the bodies of If, Loop and functions",
        Shown("step-test TEXT/step-fails-function", "KV202", code=1),
        Shown(f"inspect {MARIAN}", 'If "optimum::if", cached branch', code=1),
    ),
    yes(
        "Compare two model files",
        Shown(
            "diff fixtures/exports/marian-4.46.3 fixtures/exports/marian-4.57.6 --static",
            "a loop written for A works with B",
        ),
    ),
)
STATIC = (
    yes("Check the rules of the ONNX format", Shown("step-test TEXT/invalid-graph", "KV004", code=1)),
    yes(
        "Report every fault, not the first one only",
        Shown("step-test TEXT/two-faults", "2 errors", code=1),
    ),
    yes("Give each finding a fixed code with an explanation", Shown("explain KV315", "KV315 mask-not-offset")),
    yes(
        "Check the cache contract without running: lost slots, types, shapes, order",
        Shown("inspect TEXT/past-without-present", "KV102", code=1),
        Shown("inspect TEXT/cache-dtype-mismatch", "KV104", code=1),
        Shown("inspect TEXT/layers-inconsistent", "KV106"),
    ),
    yes(
        "Find lengths that the trace fixed",
        Shown("inspect TEXT/past-axis-frozen", "KV110", code=1),
        Shown("step-test TEXT/step-fails", "KV202", code=1),
    ),
    yes(
        "Find what fails on tensors of length 0",
        Shown("step-test TEXT/empty-past-rejected", "KV201", code=1),
        Shown("step-test TEXT/empty-tensor-hazard", "KV410", code=0),
    ),
    yes(
        "Suspect constants of the trace: masks, positions, branches",
        Shown(f"inspect {BY_HAND}/mask-if-traced-on-one-token.onnx", "KV313"),
        Shown("inspect TEXT/positions-not-offset", "KV310"),
    ),
    yes(
        "Know the cache of the standard Attention operator",
        Shown("step-test TEXT/layout-attention-23-healthy", "healthy"),
        Shown("inspect TEXT/attention-cache-half-wired", "KV108", code=1),
    ),
    yes(
        "Tell which onnxruntime a file needs",
        Shown("inspect TEXT/layout-attention-23-healthy", "needs onnxruntime"),
    ),
    yes(
        "Find weights that are zero, duplicated or of the wrong type",
        Tested("tests/test_suspect_weights.py", "test_damaged_weights_are_named_with_layer_and_role"),
        Shown("step-test TEXT/duplicate-weights", "KV502"),
    ),
    yes(
        "Find overflow in half precision",
        Shown("inspect TEXT/non-finite-half-mask", "KV304", code=0),
        Shown("step-test TEXT/non-finite", "KV304", code=1),
    ),
    no("Scan for malicious content", "left to scanners such as modelaudit; a hostile file is read safely"),
)
STEPS = (
    yes(
        "Run a decoder as it is: no config, no checkpoint, no shapes by hand",
        Shown(f"step-test {BY_HAND}/right.onnx", "healthy"),
    ),
    yes(
        "Make inputs that fit each other for an unknown graph",
        Shown("step-test TEXT/unnamed-mask-positions-healthy", "healthy"),
    ),
    yes("Run on an empty past", Shown(f"step-test {GPT2}", at="runs[empty-past].outcome", value="passed")),
    yes(
        "Sweep batch sizes and lengths",
        Shown(f"step-test {GPT2} --thorough", at="runs[long-chunks].outcome", value="passed"),
    ),
    yes(
        "Decode token by token in plain ONNX Runtime, whatever the names",
        Shown(f"step-test {BY_HAND}/right-anonymous.onnx", at="runs[plain-loop].outcome", value="passed"),
    ),
    yes(
        "Run both branches of a merged decoder and compare them",
        Shown("step-test TEXT/branches-disagree", "KV311", code=1),
    ),
    yes(
        "Try a prompt in chunks, a second turn, and going back",
        Shown(f"step-test {GPT2}", at="runs[chunk].outcome", value="passed"),
        Shown(f"step-test {GPT2}", at="runs[second-turn].outcome", value="passed"),
        Shown(f"step-test {GPT2}", at="runs[rewind].outcome", value="passed"),
    ),
    yes(
        "Test that padding and other rows of a batch change nothing",
        Shown(f"step-test {GPT2}", at="runs[left-padding].outcome", value="passed"),
        Shown("step-test TEXT/batch-rows-interact", "KV305"),
    ),
    yes(
        "Run static, ring and shared caches to their limit",
        Shown("step-test TEXT/layout-scatter-static-healthy", "healthy"),
        Shown("step-test TEXT/context-limit-healthy --thorough", "healthy"),
        Shown("step-test TEXT/context-limit-fails --thorough", "KV209", code=0),
    ),
    yes(
        "Run encoder-decoders with their cross-attention cache",
        Shown(f"step-test {MARIAN}", "cross-attention", code=1),
    ),
    yes(
        "Survive a runtime that crashes, hangs or takes all memory",
        Shown("step-test TEXT/worker-died", "KV011", code=3),
        Tested("tests/test_kill.py", "test_no_worker_outlives_the_command"),
    ),
    yes(
        "Explain a failure: node, operator, shapes, layer, code",
        Shown(f"step-test {MARIAN}", 'fails in Reshape "/model/decoder/layers.0/encoder_attn/Reshape_4"', code=1),
    ),
)
PARITY = (
    yes(
        "Compare a file with itself, with and without the cache",
        Shown(f"step-test {GPT2}", "agree with a run without a cache"),
    ),
    yes(
        "Compare with the PyTorch checkpoint",
        Tested("tests/test_reference.py", "test_an_export_agrees_with_its_checkpoint"),
    ),
    yes(
        "Compare with another ONNX file",
        Shown(f"diff {GPT2} {GPT2} --agree bits", "equal bit for bit, 8 steps of plain-loop"),
    ),
    yes(
        "Compare with stored golden results",
        Shown(f"record {GPT2} -o OUT", "golden numbers of decoder: 34 calls"),
        Tested("tests/test_golden.py", "test_changed_weights_are_found_with_the_call_and_the_tokens"),
    ),
    yes(
        "Compare the cache that a step returns, not the logits alone",
        Shown("step-test TEXT/present-rewrites-past", "KV312", code=1),
    ),
    yes(
        "Measure KL divergence, best tokens and angle, not one maximum",
        Shown(f"step-test {GPT2} -v", "KL, nats"),
    ),
    yes(
        "Choose tolerances by arithmetic, and give the reason",
        Tested("tests/test_exactness.py", "test_what_is_rounded_decides"),
    ),
    yes(
        "Tell rounding from faults by a float32 copy",
        Shown("step-test TEXT/cached-differs-rounded", "in a float32 copy"),
    ),
    yes(
        "Show how the difference grows over the steps",
        Shown(f"step-test {GPT2} -v", "max diff, SD"),
        Shown("step-test TEXT/wrong-at-lengths", "KV308", code=1),
    ),
    partly(
        "Compare execution providers",
        "a run has one provider; two are compared by the record of a loop, or by two reports",
        Shown(f"step-test {GPT2} --provider CPUExecutionProvider", "healthy"),
        Tested("tests/loops/test_recorded_runs.py", "test_a_wrong_provider_is_found_with_its_first_step_and_tensor"),
    ),
    yes(
        "Compare releases of the runtime in isolated environments",
        Shown(f"inspect {GPT2} --target onnxruntime==1.16.3", at="targets.0.onnxruntime", value="1.16.3"),
        Tested("tests/test_targets.py", "test_what_is_right_here_and_not_there_is_found"),
    ),
)
CAUSE = (
    yes(
        "Name the first node that fails",
        Shown("step-test TEXT/step-fails", "fails in", code=1),
    ),
    yes(
        "Name the first node that differs from PyTorch",
        Tested("tests/test_module_differences.py", "test_the_first_module_that_differs_is_named"),
    ),
    yes(
        "Name the first node where the run with the cache departs from the one without",
        Shown(f"step-test {BY_HAND}/mask-top-left.onnx", "first divergence: layer 0, Where", code=1),
    ),
    yes(
        "Compare layer by layer without holding all values in memory",
        Tested("tests/test_locate.py", "test_one_layer_of_a_real_export"),
    ),
    yes(
        "Write a minimal model and script that show the failure",
        Shown(f"repro {MARIAN} -o OUT", "KV203", file="reproduce.py", code=1),
    ),
    yes(
        "Say who is at fault: feed, graph, kernel, release, rounding",
        Shown("step-test TEXT/loop-breaks-contract --trace TEXT/loop-breaks-contract/loop.jsonl", "KV208", code=1),
        Shown(f"step-test {MARIAN}", "KV203", code=1),
        Tested("tests/loops/test_recorded_runs.py", "test_a_wrong_provider_is_found_with_its_first_step_and_tensor"),
        Shown("step-test TEXT/operator-unsupported --target onnxruntime==1.16.3 --offline", "KV403", code=1),
        Shown("step-test TEXT/cached-differs-rounded", "in a float32 copy"),
    ),
    yes(
        "Lead from a node to the module or line of the model's source",
        Shown(
            "step-test TEXT/mask-not-offset-dynamo",
            "model.layers.1.self_attn (LlamaAttention), llama/modeling_llama.py:257 forward",
            code=1,
        ),
        Shown(
            f"step-test {MARIAN}",
            at="findings.0.sources.0.module",
            value="model.decoder.layers.0.encoder_attn",
            code=1,
        ),
        Tested("evidence/zoo/test_zoo.py", "test_a_fault_in_a_dynamo_export_leads_to_the_line_of_the_model"),
    ),
    yes(
        "Find the optimization level that breaks a model, and the single pass",
        Shown("step-test TEXT/non-finite-half-mask", "right with the pass ConstantFolding disabled", code=1),
        Shown(f"step-test {GPT2} --thorough", at="runs[way-off].outcome", value="passed"),
    ),
    yes(
        "Link findings to known issues",
        Shown("explain KV203", "https://github.com/huggingface/optimum/pull/926"),
        Shown(f"step-test {MARIAN} -v", "optimum/pull/1257", code=1),
    ),
)
REPAIR = (
    yes(
        "Fix sizes for compilers that need numbers",
        Shown(f"convert {GPT2} -o OUT --sizes batch=1,new=1,past=16", "healthy"),
    ),
    yes(
        "Free lengths that a trace fixed",
        Shown("re-export TEXT/past-axis-frozen -o OUT", "free-past"),
    ),
    yes(
        "Merge a pair, and take a merged decoder apart",
        Shown(f"convert {MARIAN}/decoder_model_merged.onnx --layout pair -o OUT", "✓ pair works: plain-loop"),
    ),
    yes(
        "Rename inputs and outputs to what a runtime expects",
        Shown(f"convert {BY_HAND}/right-anonymous.onnx --layout optimum -o OUT", "x0 → input_ids"),
    ),
    yes(
        "Change opset and IR version, also of large files",
        Shown(f"convert {GPT2} --opset 17 -o OUT", "healthy"),
        Shown(f"convert {GPT2} --opset 21 -o OUT", at="repair.proved", value=True),
        Tested("tests/test_raising.py", "test_weights_of_three_gigabytes_are_not_read"),
    ),
    yes(
        "Accept a repair only if steps and logits are right afterwards",
        Shown(f"re-export {MARIAN} -o OUT", at="repair.proved", value=True),
    ),
    yes(
        "Show the change beforehand, record it, and say how to undo it",
        Shown(f"re-export {MARIAN} -o OUT --dry-run", "pass-through", code=1),
        Shown(f"re-export {MARIAN} -o OUT", "pass-through", file="kvdoctor-report.md"),
    ),
)
EXPORT = (
    yes(
        "Export from a checkpoint, with a cache",
        Tested(
            "tests/test_export_from_checkpoint.py", "test_an_export_is_made_repaired_proved_and_written_with_its_recipe"
        ),
    ),
    yes(
        "Choose exporter and flags by the diagnosis, in an environment of its own",
        Tested(
            "tests/test_export_from_checkpoint.py",
            "test_the_exporter_is_that_of_the_layout_unless_another_is_asked_for",
        ),
    ),
    yes(
        "Keep the interface of the old file and prove that the results agree",
        Tested("tests/test_export_from_checkpoint.py", "test_inputs_and_outputs_that_differ_are_named"),
    ),
    yes(
        "Write the script that made the export",
        Tested(
            "tests/test_export_from_checkpoint.py", "test_an_export_is_made_repaired_proved_and_written_with_its_recipe"
        ),
    ),
)
TARGETS = (
    yes(
        "Tell which operators an execution provider has",
        Shown(f"inspect {GPT2} -v", "ConstantOfShape, IsNaN, Range"),
        Shown("step-test TEXT/operator-unsupported --target onnxruntime==1.16.3 --offline", "KV403", code=1),
    ),
    yes(
        "Compare genai_config.json with the graph",
        Shown("inspect TEXT/config-disagrees-genai", "KV020", code=0),
    ),
    yes(
        "Compare config.json and the tokenizer with the graph",
        Shown("inspect TEXT/config-disagrees", "KV020", code=0),
        Tested("tests/test_tokenizer.py", "test_ids_that_generation_uses_are_in_range"),
    ),
    yes(
        "Hold a model to a file that says which inputs and outputs it must have",
        Tested("tests/test_required_contract.py", "test_a_model_that_breaks_its_contract_fails"),
        Shown(f"diff {MARIAN} {GPT2} --static", "contract broken: the stack merged", code=1),
    ),
    yes(
        "Check the metadata proposed for inference (onnx/onnx#8184)",
        Shown("inspect TEXT/config-disagrees-inference", "inference_metadata.yaml and the graph disagree"),
        Tested("tests/test_inference_metadata.py", "test_each_entry_counts"),
    ),
)
REPORTS = (
    yes("Report as JSON", Shown(f"step-test {GPT2}", at="schema", value="kvdoctor/report/1")),
    yes("Publish a schema with a version for it", Shown("schema report", "kvdoctor/report/1")),
    yes("Report as SARIF", Shown(f"step-test {MARIAN} --format sarif", '"version": "2.1.0"', code=1)),
    yes("Report as JUnit XML", Shown(f"step-test {MARIAN} --format junit", "<testsuite", code=1)),
    yes("Annotate on GitHub", Shown(f"step-test {MARIAN} --format github", "::error", code=1)),
    yes("Report as Markdown", Shown(f"step-test {MARIAN} --format markdown", "cross-cache-emptied", code=1)),
    yes(
        "Report as one HTML page that loads nothing",
        Shown(f"step-test {MARIAN} --format html", "<!doctype html>", code=1),
    ),
    yes(
        "Pack what an issue needs: no weights, versions, inputs, command",
        Shown(f"repro {MARIAN} -o OUT", "kvdoctor", file="README.md", code=1),
    ),
)
CI = (
    yes(
        "Tell findings from tool errors by documented exit codes",
        Shown(f"step-test {MARIAN}", "exit 1", code=1),
        Shown("step-test TEXT/layout-paged-healthy", "exit 3", code=3),
        Shown("step-test no/such/model", "does not exist", code=2),
    ),
    yes(
        "Select and ignore rules",
        Shown(f"step-test {MARIAN} --select KV315", "KV315"),
    ),
    yes(
        "Know findings from a baseline, with reason and date",
        Shown(f"baseline {MARIAN} --no-config -o OUT --reason upstream --until 2099-01-01", "upstream", file="."),
    ),
    yes(
        "Configure in pyproject.toml",
        Tested("tests/test_policy.py", "test_the_table_of_pyproject_is_read_and_other_tables_are_nobody_s_business"),
    ),
    yes(
        "Offer a GitHub Action and a pre-commit hook",
        Held("action.yml", "kvdoctor gate"),
        Held(".pre-commit-hooks.yaml", "entry: kvdoctor gate"),
    ),
    yes(
        "Check many models at once, unchanged ones from a cache",
        Shown(f"gate {GPT2} fixtures/exports/llama-gqa --no-config", "2 of 2 models healthy"),
        Tested("tests/test_gate_running.py", "test_what_has_not_changed_is_not_run_again"),
    ),
)
SPEED = (
    yes(
        "Measure time to the first token and tokens per second",
        Shown(f"speed {GPT2}", "tokens per second"),
    ),
    yes(
        "Measure the gain of the cache over the past, for any decoder",
        Shown("step-test TEXT/cache-not-faster", "KV501"),
    ),
    yes(
        "Measure peak memory for each step, and leaks",
        Shown(f"speed {GPT2}", "2000 equal steps took"),
    ),
    yes(
        "Fail on slower runs than a stored baseline",
        Tested("tests/test_speed.py", "test_a_model_that_was_a_thousand_times_as_fast_is_slower_now"),
    ),
)
USING = (
    yes(
        "Install small, without PyTorch",
        Tested("tests/test_wheel.py", "test_a_wheel_in_an_empty_environment_does_all_that_the_readme_shows"),
    ),
    yes(
        "Start within a third of a second",
        Tested("tests/test_api.py", "test_the_first_page_loads_nothing_heavy"),
    ),
    yes(
        "Send nothing home, and work offline",
        Shown(f"step-test {GPT2} --offline", "healthy"),
    ),
    partly(
        "Run on Linux, macOS and Windows",
        "the tests were run on Linux; the commands also with the programs of Windows under Wine; nothing on macOS "
        "([systems](../docs/platforms.md))",
        Shown("env", "linux"),
        Tested("tests/test_platforms.py", "test_every_module_loads_without_the_modules_of_unix"),
    ),
    yes("Check its own environment", Shown("env", "execution providers")),
    partly(
        "Offer a Python API and rules as plugins",
        "there is no entry point for rules of others",
        Tested("tests/test_api.py", "test_it_returns_what_the_command_line_prints"),
    ),
)
FEATURES: dict[str, tuple[Feature, ...]] = {
    "Read": READING,
    "Check without running": STATIC,
    "Run decode steps": STEPS,
    "Compare": PARITY,
    "Find the cause": CAUSE,
    "Repair": REPAIR,
    "Export again": EXPORT,
    "Check for a target": TARGETS,
    "Report": REPORTS,
    "Guard in CI": CI,
    "Measure speed and memory": SPEED,
    "Use": USING,
}
