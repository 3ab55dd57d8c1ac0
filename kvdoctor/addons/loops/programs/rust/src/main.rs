//! Decodes from the command line: token ids in, token ids out. `--help` lists the options.

mod providers;
mod runs;

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use decode_loop::{Contract, Decoder, Sampler, Sampling, Settings, Trace, ort};

use runs::{Run, Source, number, numbers};

/// What goes wrong here ends the program with its text.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const HELP: &str = "Token ids in, token ids out.

  --model FOLDER       folder of the model files
  --contract FILE      its contract (contract.json of this project)
  --prompt IDS         ids with commas; once a sequence
  --source IDS|FILE    ids for the encoder, once a sequence; else a file of its input: float32, little endian
  --source-shape SIZES shape of that file, with commas
  --most N             the most new tokens (20)
  --stop IDS           ids that end a sequence, with commas (those of the contract)
  --follow IDS         continue with these ids whatever is likeliest; once a sequence
  --self-test TESTS    with --follow: also rewind,reorder, and compare
  --temperature T      0 takes the likeliest token, otherwise sampled (0)
  --top-k N            sample from so many tokens, 0 for all (50)
  --top-p P            sample from the likeliest tokens with this probability (1)
  --min-p P            sample from tokens with this part of the largest probability (0)
  --repetition-penalty X  on tokens that are there already (1)
  --seed N             of the sampling (0)
  --capacity N         room of the cache in tokens, where the contract leaves it open (512)
  --threads N          threads of a session
  --provider NAME      execution provider (cpu)
  --record FILE        play the runs, and write a trace for kvdoctor step-test --trace
  --runs FILE          runs to play (vectors.json next to the contract)
";

#[derive(Default)]
struct Options {
    model: Option<PathBuf>,
    contract: Option<PathBuf>,
    settings: Settings,
    run: Run,
    sources: Vec<String>,
    source_shape: Vec<usize>,
    record: Option<PathBuf>,
    runs: Option<PathBuf>,
    most: Option<usize>,
    stop: Option<Vec<i64>>,
    sampling: Sampling,
}

impl Options {
    /// Reads the arguments; `None` where they ask for help.
    fn parse(mut arguments: impl Iterator<Item = OsString>) -> Result<Option<Self>> {
        let mut options = Self { sampling: Sampling { top_k: 50, ..Sampling::default() }, ..Self::default() };
        while let Some(name) = arguments.next() {
            let name = name.to_string_lossy();
            if name == "--help" || name == "-h" {
                return Ok(None);
            }
            let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
            options.set(&name, value)?;
        }
        if options.record.is_some() != options.run.prompts.is_empty() {
            return Err("give at least one --prompt, or a --record; --help lists the options".into());
        }
        if options.most == Some(0) || options.sampling.temperature.is_nan() || options.sampling.temperature < 0.0 {
            return Err("--most is 1 or more, and --temperature 0 or more".into());
        }
        if options.run.follow.is_empty() && options.run.self_test.is_some() {
            return Err("--self-test needs --follow".into());
        }
        Ok(Some(options))
    }

    fn set(&mut self, name: &str, value: OsString) -> Result<()> {
        let text = value.to_string_lossy();
        match name {
            "--model" => self.model = Some(value.into()),
            "--contract" => self.contract = Some(value.into()),
            "--prompt" => self.run.prompts.push(numbers(name, &text)?),
            "--source" => self.sources.push(text.into_owned()),
            "--source-shape" => self.source_shape = numbers(name, &text)?,
            "--follow" => self.run.follow.push(numbers(name, &text)?),
            "--self-test" => self.run.self_test = Some(text.into_owned()),
            "--record" => self.record = Some(value.into()),
            "--runs" => self.runs = Some(value.into()),
            "--capacity" => self.settings.capacity = number(name, &text)?,
            "--threads" => self.settings.threads = Some(number(name, &text)?),
            "--provider" => self.settings.providers = providers::find(&text)?,
            "--most" => self.most = Some(number(name, &text)?),
            "--stop" => self.stop = Some(numbers(name, &text)?),
            "--temperature" => self.sampling.temperature = number(name, &text)?,
            "--top-k" => self.sampling.top_k = number(name, &text)?,
            "--top-p" => self.sampling.top_p = number(name, &text)?,
            "--min-p" => self.sampling.min_p = number(name, &text)?,
            "--repetition-penalty" => self.sampling.repetition_penalty = number(name, &text)?,
            "--seed" => self.sampling.seed = number(name, &text)?,
            _ => return Err(format!("there is no option {name}; --help lists them").into()),
        }
        Ok(())
    }

    /// The source in the form that the contract asks for.
    fn source(&mut self, contract: &Contract) -> Result<Option<Source>> {
        let ids = match (contract.source_is_ids(), self.sources.is_empty()) {
            (None, true) => return Ok(None),
            (None, false) => return Err("this model takes no --source".into()),
            (Some(_), true) => return Err("give a --source".into()),
            (Some(ids), false) => ids,
        };
        if !ids {
            return Ok(Some(Source::Floats { file: self.sources.remove(0).into(), shape: self.source_shape.clone() }));
        }
        let rows: Result<_> = self.sources.iter().map(|source| numbers("--source", source)).collect();
        Ok(Some(Source::Ids(rows?)))
    }
}

fn main() -> ExitCode {
    decode().unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

/// Tokens go to standard output, a line for each sequence, and measurements to standard error.
fn decode() -> Result<ExitCode> {
    let Some(mut given) = Options::parse(std::env::args_os().skip(1))? else {
        write!(io::stdout(), "{HELP}")?;
        return Ok(ExitCode::SUCCESS);
    };
    let folder = given.model.as_ref().ok_or("give the --model folder")?;
    // Projects of one name share a program where they share a target folder: `cargo run` says which of them runs.
    let project = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let own = || Path::new(&project).join("contract.json");
    let file = given.contract.clone().unwrap_or_else(own);
    let environment = ort::init().build()?;
    let mut decoder = Decoder::open(&environment, folder, Contract::read(&file)?, given.settings.clone())?;
    if let Some(trace) = std::env::var_os("KVDOCTOR_TRACE").filter(|file| !file.is_empty()) {
        decoder.set_trace(Some(Trace::new(OpenOptions::new().create(true).append(true).open(trace)?, None)));
    }
    if let Some(record) = &given.record {
        let runs = given.runs.unwrap_or_else(|| file.with_file_name("vectors.json"));
        let all = runs::record(&mut decoder, &runs, record)?;
        return Ok(if all { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    given.run.source = given.source(decoder.contract())?;
    let began = Instant::now();
    given.run.encode(&mut decoder, Path::new(""))?;
    let mut times = Vec::new();
    let made = if !given.run.follow.is_empty() {
        given.run.follow(&mut decoder, || times.push(Instant::now()))?
    } else {
        let mut generation = decoder.contract().generation.clone();
        generation.most = given.most.unwrap_or(20);
        generation.end = given.stop.unwrap_or(generation.end);
        let mut sampler = Sampler::new(given.sampling);
        let choose = |logits: &[f32], tokens: &[i64]| Ok(sampler.choose(logits, tokens));
        decoder.generate(&given.run.prompts, &generation, choose, |_| {
            times.push(Instant::now());
            ControlFlow::Continue(())
        })?
    };
    let mut lines = io::stdout().lock();
    for row in made {
        writeln!(lines, "{}", row.iter().map(i64::to_string).collect::<Vec<_>>().join(","))?;
    }
    if let (Some(first), Some(last)) = (times.first(), times.last()) {
        let (first_ms, seconds) = ((*first - began).as_secs_f64() * 1000.0, (*last - *first).as_secs_f64());
        let rate = if seconds > 0.0 { (times.len() - 1) as f64 / seconds } else { 0.0 };
        eprintln!("first token {first_ms:.1} ms, {rate:.1} tokens/s{}", peak_memory().unwrap_or_default());
    }
    Ok(ExitCode::SUCCESS)
}

/// `, peak memory N MiB`, the largest resident memory of this process so far; Linux has it in a file.
fn peak_memory() -> Option<String> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib = line.split_whitespace().next()?.parse::<u64>().ok()?;
    Some(format!(", peak memory {} MiB", kib / 1024))
}
