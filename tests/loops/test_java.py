"""The decode loop in Java: its literals and its values, and that javac and google-java-format take what is printed."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support import text_fixtures
from support.embedding_models import TWO_KINDS, pair_of_graphs, plan_of_layout
from support.isolated import EXPORTS, kvdoctor

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.loops.language import languages
from kvdoctor.loops.languages.java.expressions import Call, layouts, literal, refuses, value
from kvdoctor.loops.make_plan import make_plan
from kvdoctor.loops.pipeline import LoopRequest, write_loop
from kvdoctor.loops.plan import Input, LoopPlan
from kvdoctor.loops.project import render
from kvdoctor.options import Options

HOSTILE = [
    "",
    'a"b',
    "back\\slash",
    "\\u0022",
    "${name}",
    "line\nend\r\ttab",
    "\x001",
    "*/ /* //",
    '"""',
    "{@code}",
    "class",
    "\u2028\x85\u202e",
    "日本 é",
    "\U0001f600",
    "\x1a",
    "n" * 10_000,
    "\u20ac" * 30_000,
]

ONNXRUNTIME = "com.microsoft.onnxruntime:onnxruntime:1.29.0"
FORMATTER = "com.google.googlejavaformat:google-java-format:1.28.0:jar:all-deps"
DEPENDENCIES = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1"

PLANS = [
    ("marian-4.57.6", "merged"),
    ("marian-4.57.6", "pair"),
    ("llama-gqa", "decoder"),
    ("gpt2", "decoder"),
    ("whisper", "merged"),
    ("t5", "pair"),
]


def plan_of(model: str, stack: str) -> LoopPlan:
    folder = open_folder(str(EXPORTS / model))
    chosen = next(one for one in folder.stacks if one.name == stack)
    return make_plan(read_contract(chosen, folder.side_cars), model)


def programs(plan: LoopPlan, folder: Path) -> list[Path]:
    files = {folder / name: text for name, text in render(plan, languages()["java"]).items() if name.endswith(".java")}
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(files)


def jar(artifact: str, folder: Path) -> Path:
    """A jar of Maven Central, or of Maven's cache."""
    if shutil.which("mvn") is None or shutil.which("javac") is None:
        pytest.skip("needs a JDK and Maven")
    command = ["mvn", "-q", f"{DEPENDENCIES}:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={folder}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"Maven has no {artifact}: {done.stdout[-300:]}")
    return next(folder.glob("*.jar"))


def compiled(files: list[Path], library: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["javac", "-Xlint:all", "-Werror", "--release", "17", "-encoding", "UTF-8", "-cp", str(library), "-d"]
    return subprocess.run([*command, str(folder), *map(str, files)], capture_output=True, text=True, check=False)


def test_a_literal_escapes_what_ends_it() -> None:
    assert literal('a"b\\c\n') == r'"a\"b\\c\n"'
    assert literal("\x001") == r'"\0001"'
    assert literal("é\U0001f600") == r'"\u00e9\ud83d\ude00"'
    assert literal(None) == "null"


def test_a_literal_longer_than_a_constant_is_put_together() -> None:
    assert literal("n" * 30_000).count(".concat(") == 1


def test_a_value_is_a_function_of_the_index() -> None:
    plan = plan_of("llama-gqa", "decoder")
    made = {one.name: value(one, plan).flat for one in plan.decode.inputs}
    assert made["attention_mask"] == "int64(i -> i % total >= padding[i / total] ? 1 : 0, batch, total)"
    unpadded = replace(plan, pads=False)
    assert value(plan.decode.of_rule("attention-mask")[0], unpadded).flat == "int64(i -> 1, batch, total)"


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (Input("x", "bool", (1,), "number", "cached"), "bool(i -> past > 0, 1)"),
        (Input("x", "int64", (), "number", "last"), "int64(i -> total - 1)"),
        (Input("x", "float16", (1,), "number", value=0.5), "float16(i -> 0.5, 1)"),
        (
            Input("x", "int32", ("new",), "tokens"),
            "int32(i -> tokens[i / newTokens][i % newTokens], batch * newTokens)",
        ),
        (
            Input("x", "float", ("batch", 1, "new", 24), "causal-mask", hidden=-1e4, from_right=True),
            "float32(i -> i % 24 >= 24 - total && i % 24 - (24 - total) <= past + i / 24 % newTokens ? 0 : -10000, "
            "batch, 1, newTokens, 24)",
        ),
    ],
)
def test_values_of_other_models(one: Input, expected: str) -> None:
    assert value(one, plan_of("llama-gqa", "decoder")).flat == expected


def test_slots_of_the_same_layout_share_a_constant() -> None:
    assert list(layouts(plan_of("marian-4.57.6", "merged"))) == ["SELF_ATTENTION", "CROSS_ATTENTION"]


def test_a_call_is_laid_out_by_its_width() -> None:
    assert Call("f", ("a", "b")).lines(4, ";") == ["    f(a, b);"]
    long, head = "a" * 60, "f" * 30
    assert Call(head, (long, "b")).lines(4, ";") == [f"    {head}({long}, b);"]
    assert Call(head, (long, "bbb")).lines(4, ";") == [f"    {head}(", f"        {long}, bbb);"]
    assert Call(head, (long, long)).lines(4, ";") == [f"    {head}(", f"        {long},", f"        {long});"]


def test_names_that_the_binding_does_not_find_are_refused() -> None:
    plan = plan_of("llama-gqa", "decoder")
    assert refuses(plan) is None
    assert "modified UTF-8" in (refuses(renamed(plan, "\U0001f600")) or "")


def renamed(plan: LoopPlan, name: str) -> LoopPlan:
    """A plan whose names all end in `name`."""

    def call(one):
        inputs = tuple(replace(i, name=i.name + name) for i in one.inputs)
        lists = {field: tuple(n + name for n in getattr(one, field)) for field in ("pasts", "outputs")}
        return replace(one, file=one.file + name, inputs=inputs, logits=one.logits + name, **lists)

    slots = [replace(s, **{f: getattr(s, f) + name for f in ("past", "made", "present")}) for s in plan.slots]
    calls = {"prefill": call(plan.prefill), "decode": call(plan.decode)}
    return replace(plan, model=plan.model + name, slots=tuple(slots), **calls)


@pytest.mark.slow
def test_hostile_names_are_the_strings_that_they_were(tmp_path: Path) -> None:
    if shutil.which("javac") is None:
        pytest.skip("needs a JDK")
    names = ",\n".join(map(literal, HOSTILE))
    lines = "    for (String name : new String[] {%s}) {\n System.out.println(name.chars().boxed().toList());\n}\n"
    program = tmp_path / "Names.java"
    program.write_text(f"class Names {{ public static void main(String[] a) {{\n{lines % names}}}}}", encoding="ascii")
    printed = subprocess.run(["java", str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    for name, line in zip(HOSTILE, printed, strict=True):
        units = name.encode("utf-16-be")
        expected = [int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2)]
        assert [int(unit) for unit in line.strip("[]").split(", ") if unit] == expected


@pytest.mark.slow
def test_a_loop_with_hostile_names_compiles(tmp_path: Path) -> None:
    library = jar(ONNXRUNTIME, tmp_path)
    files = programs(renamed(plan_of("llama-gqa", "decoder"), "".join(HOSTILE[:-1])), tmp_path)
    done = compiled(files, library, tmp_path / "classes")
    assert not done.returncode, done.stderr[:2000]


def test_what_the_embedding_graph_makes_is_fed_and_the_rest_is_closed(tmp_path: Path) -> None:
    plan = pair_of_graphs(tmp_path)
    text = render(plan, languages()["java"])["src/main/java/decodeloop/Decoder.java"]
    assert text.count("embed(tokens);") == 2
    assert text.count('inputs.put("inputs_embeds", embedded.get("inputs_embeds"));') == 2
    assert text.count('inputs.put("per_layer_inputs", embedded.get("per_layer_inputs"));') == 1
    assert text.count('embedded.get("per_layer_inputs").close();') == 1


@pytest.mark.slow
def test_the_loops_of_the_fixtures_are_formatted_and_free_of_warnings(tmp_path: Path) -> None:
    libraries = tmp_path / "library", tmp_path / "formatter"
    for folder in libraries:
        folder.mkdir()
    library, formatter = jar(ONNXRUNTIME, libraries[0]), jar(FORMATTER, libraries[1])
    plans = {f"{model} {stack}": plan_of(model, stack) for model, stack in PLANS}
    for layout in (TWO_KINDS, "layout-embedding-image-healthy"):
        plans[layout] = plan_of_layout(layout, tmp_path / "models" / layout)
    plans["two kinds of embeddings, one of them in the first call"] = pair_of_graphs(tmp_path / "models" / "pair")
    for number, (name, plan) in enumerate(plans.items()):
        folder = tmp_path / str(number)
        files = programs(plan, folder)
        done = compiled(files, library, folder)
        assert not done.returncode, done.stderr
        command = ["java", "-jar", str(formatter), "--dry-run", *map(str, files)]
        unstable = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert not unstable, f"{name}: google-java-format changes {unstable}"


@dataclass
class Program:
    """A compiled loop, its model, and calls with the tokens that they must print."""

    model: Path
    classpath: str
    vectors: list[dict[str, Any]]

    def run(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run it; an argument with spaces is several."""
        words = [word for argument in arguments for word in str(argument).split(" ")]
        command = ["java", "-cp", self.classpath, "decodeloop.Main", "--model", str(self.model), *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | environment, timeout=120
        )

    def error(self, *arguments: str | Path) -> str:
        """What is said to arguments that are wrong."""
        done = self.run(*arguments)
        assert (done.returncode, done.stdout) == (1, "")
        return done.stderr.strip().removeprefix("error: ")

    @property
    def project(self) -> Path:
        return Path(self.classpath.split(os.pathsep)[0]).parent


def program(model: Path, folder: Path) -> Program:
    library = jar(ONNXRUNTIME, folder)
    out = folder / "project"
    assert write_loop(LoopRequest(str(model), str(out), "java"), Options()).out
    done = compiled(list(out.rglob("*.java")), library, out / "classes")
    assert not done.returncode, done.stderr
    vectors = json.loads((out / "kvdoctor-loop.json").read_text(encoding="utf-8"))["vectors"]
    return Program(model, f"{out / 'classes'}{os.pathsep}{library}", vectors)


@pytest.fixture(scope="module", params=["marian-4.57.6", "llama-gqa", "whisper"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    return program(EXPORTS / request.param, tmp_path_factory.mktemp("java"))


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return program(EXPORTS / "marian-4.57.6", tmp_path_factory.mktemp("java"))


def line_of(name: str, vector: dict[str, Any]) -> str:
    """A line of a probe file; a run with the name of a self-test makes it."""
    expected = [",".join("-1" if token is None else str(token) for token in row) for row in vector["expected"]]
    words = ["--run", name, *vector["arguments"][: vector["arguments"].index("--self-test")]]
    words += [word for row in expected for word in ("--expect", row)]
    return " ".join([*words, *(["--self-test", name] if name in ("rewind", "reorder") else [])])


def lines_of(result: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_a_probe_runs_each_line_and_writes_down_its_calls(built: Program, tmp_path: Path) -> None:
    probe, result = built.project / "runs.txt", tmp_path / "result.jsonl"
    most = max(built.vectors, key=lambda vector: len(vector["expected"]))
    vectors = [*built.vectors, most, most, built.vectors[0]]
    names = [vector["name"].replace(" ", "-") for vector in built.vectors]
    names += ["rewind", "reorder", f"{names[0]}-again"]
    runs = [line_of(name, vector) for name, vector in zip(names, vectors, strict=True)]
    probe.write_text("\n\n".join(runs) + "\n", encoding="utf-8")
    result.write_text("an old result\n", encoding="utf-8")
    done = built.run("--probe", probe, "--result", result)
    assert done.stdout.splitlines() == [f"{name}: as expected" for name in names], done.stderr
    assert done.returncode == 0
    lines = lines_of(result)
    ends = [line for line in lines if "tokens" in line]
    for name, vector, end in zip(names, vectors, ends, strict=True):
        assert (list(end), end["run"], end["error"]) == (["run", "tokens", "error"], name, None)
        assert [len(row) for row in end["tokens"]] == [len(row) for row in vector["expected"]]
        calls = [line for line in lines if line["run"] == name and "fed" in line]
        assert len(calls) >= len(vector["expected"][0])
        assert lines.index(calls[-1]) < lines.index(end)
    for line in lines:
        assert next(iter(line)) == "run"
        for tensor in (*line.get("fed", {}).values(), *line.get("got", {}).values()):
            size = 1
            for length in tensor["shape"]:
                size *= length
            assert len(tensor["data"] if size <= 64 else tensor["sample"]) == min(size, 64)
    judged = kvdoctor("judge", built.model, result)
    assert judged.returncode == 0, judged.stdout + judged.stderr


@pytest.mark.slow
def test_a_wrong_token_is_found_and_a_failed_run_does_not_stop_the_next(built: Program, tmp_path: Path) -> None:
    probe, result = built.project / "wrong.txt", tmp_path / "result.jsonl"
    right = built.vectors[0]
    wanted = list(right["expected"][0])
    at = next(i for i, token in enumerate(wanted) if token is not None and i)
    token, wanted[at] = wanted[at], wanted[at] + 1
    beyond = [re.sub(r"^\d+", "9999", text) if text[:1].isdigit() else text for text in right["arguments"]]
    lines = [
        line_of("wrong", {**right, "expected": [wanted]}),
        line_of("failed", {**right, "arguments": beyond}),
        line_of("right", right),
    ]
    probe.write_text("\n".join(lines), encoding="utf-8")
    done = built.run("--probe", probe, "--result", result)
    assert done.returncode == 1
    wrong, failed, last = done.stdout.splitlines()
    assert wrong == f"wrong: sequence 0, step {at}: token {token} in place of {token + 1}"
    assert failed.startswith("failed: error: ")
    assert last == "right: as expected"
    end = next(line for line in lines_of(result) if line["run"] == "failed" and "tokens" in line)
    assert end["tokens"] == []
    assert end["error"]


@pytest.mark.slow
def test_a_probe_with_a_wrong_line_runs_nothing(marian: Program, tmp_path: Path) -> None:
    probe, result = tmp_path / "probe.txt", tmp_path / "result.jsonl"
    for text, said in (
        ("--prompt 5 --source 5\n", "line 1 of the probe: --run is missing"),
        ("\n--run a --most 5\n", "line 2 of the probe: unknown option --most"),
        ("\n", "the probe has no runs"),
    ):
        probe.write_text(text, encoding="utf-8")
        assert said in marian.error("--probe", probe, "--result", result)
        assert not result.read_text(encoding="utf-8")
    probe.write_text("--run a --prompt 5 --source 5 --expect -1\n", encoding="utf-8")
    assert "--result is the file of --probe itself" in marian.error("--probe", probe, "--result", probe)
    assert probe.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_trace_holds_samples_that_step_test_accepts(built: Program, tmp_path: Path) -> None:
    trace = tmp_path / "loop.jsonl"
    vector = built.vectors[0]["arguments"]
    fed = vector[: vector.index("--self-test")]
    words = [built.project / word if word.endswith(".f32") else word for word in fed]
    assert built.run(*words, KVDOCTOR_TRACE=str(trace)).returncode == 0
    lines = lines_of(trace)
    assert not any("run" in line for line in lines)
    assert any("sample" in tensor for line in lines for tensor in line["got"].values())
    done = kvdoctor("step-test", built.model, "--trace", trace, "--consumer", "held", "--format", "json")
    found = json.loads(done.stdout)
    assert not [one for one in found["findings"] if one["code"] in ("KV208", "KV420")]
    assert any("as the contract asks" in note or "none breaks it" in note for note in found["notes"]), found["notes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--prompt 5 --source 5 --most 0", "most is 1 or more"),
        ("--prompt 5 --source 5 --top-k 0", "--top-k is 1 or more"),
        ("--prompt 5 --source 5 --temperature -1", "--temperature 0 or more"),
        ("--prompt 5 --source 5 --temperature NaN", "--temperature 0 or more"),
        ("--prompt 5 --source 5 --follow 5 --self-test rewind,back", "--self-test knows rewind and reorder"),
        ("--prompt 5 --source 5 --self-test rewind", "--self-test needs tokens to --follow"),
        ("--prompt 5,128 --source 5", "token ids are 0 to 127"),
        ("--prompt 5,6 --prompt 5 --source 5 --source 6", "the rows of a batch must have the same length"),
        ("--prompt , --source 5", "each sequence needs at least one token"),
        ("--prompt 5 --source ,", "--source: at least one id is needed"),
        ("--prompt 5 --source 5 --provider cuda", "it has CPUExecutionProvider"),
        ("--prompt 5 --source 5 --expect 5", "unknown option --expect"),
        ("--prompt 5 --probe probe.txt", "unknown option --prompt"),
        ("--probe no.txt", "NoSuchFileException: no.txt"),
    ],
)
def test_wrong_arguments_are_refused(marian: Program, arguments: str, said: str) -> None:
    assert said in marian.error(arguments)


@pytest.mark.slow
def test_a_shorter_source_is_padded_and_masked(marian: Program) -> None:
    both = marian.run("--prompt 5,6 --prompt 7,8 --source 5,6,7,8 --source 9,10 --most 4")
    alone = marian.run("--prompt 7,8 --source 9,10 --most 4 --provider CPUExecutionProvider")
    assert both.stdout.splitlines()[1:] == alone.stdout.splitlines() != []


USES = """
import decodeloop.Decoder;
import java.nio.file.Path;

public class Uses {
  public static void main(String[] args) throws Exception {
    int[][] source = {{5, 6, 7}, {8, 9, 10}};
    int[][] prompts = {{5}, {6}};
    try (Decoder decoder = Decoder.open(Path.of(args[0]))) {
      refused(() -> decoder.encode(source, new int[][] {{1, 1}, {1, 1}}));
      refused(() -> decoder.encode(new int[][] {{}}));
      refused(() -> decoder.encode(new int[][] {{5, -1}}));
      decoder.encode(source);
      refused(() -> decoder.reorder(new int[] {0}));
      refused(() -> decoder.prefill(new int[][] {{5}}));
      decoder.prefill(prompts);
      refused(() -> decoder.step(new int[][] {{5}}));
      decoder.reorder(new int[] {1, 0});
      decoder.step(prompts);
      refused(() -> decoder.prefill(prompts));
      decoder.encode(source);
      decoder.prefill(prompts);
    }
  }

  interface Use {
    void run() throws Exception;
  }

  static void refused(Use use) throws Exception {
    try {
      use.run();
    } catch (IllegalArgumentException | IllegalStateException failed) {
      System.out.println(failed.getMessage());
      return;
    }
    throw new AssertionError("it was not refused");
  }
}
"""


def ran(source: str, name: str, marian: Program, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What a class beside those of the project does."""
    file = marian.project / f"{name}.java"
    file.write_text(source, encoding="utf-8")
    library = f"{marian.classpath}"
    done = compiled([file], Path(library), marian.project / "classes")
    assert not done.returncode, done.stderr
    command = ["java", "-cp", library, name, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_decoder_refuses_what_does_not_fit(marian: Program) -> None:
    done = ran(USES, "Uses", marian, marian.model)
    assert not done.returncode, done.stderr
    assert done.stdout.splitlines() == [
        "the mask of this source has the shape [2, 3]; got 2 rows of [2] numbers",
        "the source is empty",
        "the ids of the source are 0 or more",
        "there are no rows to take",
        "1 prompts for 2 sources",
        "a step takes tokens for each of 2 sequences",
        "begin with encode(), also after reorder()",
    ]


@pytest.mark.slow
def test_decoding_ends_where_the_cache_is_full(tmp_path: Path) -> None:
    model = text_fixtures.load_all()["layout-delta-healthy"].write(tmp_path / "model")
    static = program(model, tmp_path)
    done = static.run("--prompt 1,2,3 --capacity 6 --most 50")
    assert done.returncode == 0
    assert len(done.stdout.strip().split(",")) == 4
    assert "at most 2 tokens" in static.error("--prompt 1,2,3 --capacity 2")
    assert "at least one token" in static.error("--prompt 1,2,3 --capacity 0")


TRACED = """
import ai.onnxruntime.*;
import java.io.PrintStream;
import java.nio.*;
import java.util.*;

public class Traced {
  FUNCTION
  public static void main(String[] args) throws Exception {
    OrtEnvironment environment = OrtEnvironment.getEnvironment();
    OrtSession session = environment.createSession(args[0]);
    PrintStream trace = new PrintStream(args[1]);
    Map<String, OnnxTensor> inputs = new HashMap<>();
    for (Map.Entry<String, NodeInfo> input : session.getInputInfo().entrySet()) {
      if (input.getKey().startsWith("past")) {
        long[] shape = ((TensorInfo) input.getValue().getInfo()).getShape();
        shape[0] = 1;
        shape[2] = 0;
        FloatBuffer none = ByteBuffer.allocateDirect(0).order(ByteOrder.nativeOrder()).asFloatBuffer();
        inputs.put(input.getKey(), OnnxTensor.createTensor(environment, none, shape));
      }
    }
    for (int past = 0; past < 4; past++) {
      long[][] mask = new long[1][past + 1];
      Arrays.fill(mask[0], 1);
      inputs.put("input_ids", OnnxTensor.createTensor(environment, new long[][] {{5 + past}}));
      inputs.put("attention_mask", OnnxTensor.createTensor(environment, mask));
      inputs.put("position_ids", OnnxTensor.createTensor(environment, new long[][] {{past}}));
      STATEMENTS
      for (Map.Entry<String, OnnxValue> output : result) {
        if (output.getKey().startsWith("present")) {
          String name = output.getKey().replace("present", "past_key_values");
          inputs.put(name, (OnnxTensor) output.getValue());
        }
      }
    }
  }
}
"""


@pytest.mark.slow
def test_the_lines_for_java_write_a_trace(marian: Program, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "trace.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- snippet: java -->\n```java\n(.+?^}\n)(.+?)```", page, re.DOTALL | re.MULTILINE)
    assert found is not None
    text = TRACED.replace("FUNCTION", found[1]).replace("STATEMENTS", found[2])
    gpt2, trace = EXPORTS / "gpt2", tmp_path / "loop.jsonl"
    done = ran(text, "Traced", marian, gpt2 / "model.onnx", trace)
    assert not done.returncode, done.stderr
    done = kvdoctor("step-test", gpt2, "--trace", trace, "--format", "json")
    report = json.loads(done.stdout)
    assert not [one for one in report["findings"] if one["code"] in ("KV208", "KV420")]
    assert any("4 steps" in note and "none breaks it" in note for note in report["notes"]), report["notes"]
