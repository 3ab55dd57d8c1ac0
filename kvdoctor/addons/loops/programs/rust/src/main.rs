//! Decodes from the command line: token ids in, token ids out. `--help` lists the options.

mod runs;

use std::env;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use decode_loop::ort::ep;
use decode_loop::{Contract, Decoder, Sampler, Sampling, Settings, ort};

use runs::Source;

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
  --runs FILE          runs to play (vectors.json next to the contract)";

#[derive(Default)]
struct Options {
    model: PathBuf,
    contract: Option<PathBuf>,
    settings: Settings,
    prompts: Vec<Vec<i64>>,
    sources: Vec<String>,
    source_shape: Vec<usize>,
    record: Option<PathBuf>,
    runs: Option<PathBuf>,
    most: Option<usize>,
    stop: Option<Vec<i64>>,
    sampling: Sampling,
}

impl Options {
    fn set(&mut self, name: &str, value: &str) -> Result<()> {
        match name {
            "--model" => self.model = value.into(),
            "--contract" => self.contract = Some(value.into()),
            "--prompt" => self.prompts.push(numbers(name, value)?),
            "--source" => self.sources.push(value.into()),
            "--source-shape" => self.source_shape = numbers(name, value)?,
            "--record" => self.record = Some(value.into()),
            "--runs" => self.runs = Some(value.into()),
            "--capacity" => self.settings.capacity = number(name, value)?,
            "--threads" => self.settings.threads = Some(number(name, value)?),
            "--provider" => self.settings.providers = find_provider(value)?,
            "--most" => self.most = Some(number(name, value)?),
            "--stop" => self.stop = Some(numbers(name, value)?),
            "--temperature" => self.sampling.temperature = number(name, value)?,
            "--top-k" => self.sampling.top_k = number(name, value)?,
            "--top-p" => self.sampling.top_p = number(name, value)?,
            "--min-p" => self.sampling.min_p = number(name, value)?,
            "--repetition-penalty" => self.sampling.repetition_penalty = number(name, value)?,
            "--seed" => self.sampling.seed = number(name, value)?,
            _ => return Err(format!("there is no option {name}; --help lists them").into()),
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        if self.model.as_os_str().is_empty() || self.record.is_some() != self.prompts.is_empty() {
            return Err("give the --model folder, and at least one --prompt, or a --record".into());
        }
        if self.most == Some(0) || self.sampling.temperature.is_nan() || self.sampling.temperature < 0.0 {
            return Err("--most is 1 or more, and --temperature 0 or more".into());
        }
        Ok(())
    }

    /// The source in the form that the contract asks for.
    fn source(&self, contract: &Contract) -> Result<Option<Source>> {
        match (contract.source_is_ids(), self.sources.first()) {
            (None, None) => Ok(None),
            (None, Some(_)) => Err("this model takes no --source".into()),
            (Some(_), None) => Err("give a --source".into()),
            (Some(false), Some(file)) => {
                Ok(Some(Source::Floats { file: file.into(), shape: self.source_shape.clone() }))
            }
            (Some(true), _) => {
                let rows: Result<_> = self.sources.iter().map(|source| numbers("--source", source)).collect();
                Ok(Some(Source::Ids(rows?)))
            }
        }
    }
}

/// The number that an option has.
fn number<T: FromStr<Err: std::error::Error>>(name: &str, text: &str) -> Result<T> {
    text.trim().parse().map_err(|error| format!("{name} {text}: {error}").into())
}

/// Numbers with commas between them.
fn numbers<T: FromStr<Err: std::error::Error>>(name: &str, text: &str) -> Result<Vec<T>> {
    text.split(',').filter(|part| !part.is_empty()).map(|part| number(name, part)).collect()
}

/// What is added to a session for a provider, by the name of its feature or that of the runtime.
fn find_provider(name: &str) -> Result<Vec<ep::ExecutionProviderDispatch>> {
    let short = name.strip_suffix("ExecutionProvider").unwrap_or(name).to_lowercase();
    let providers: Vec<ep::ExecutionProviderDispatch> = match short.as_str() {
        "cpu" => vec![],
        #[cfg(feature = "coreml")]
        "coreml" => vec![ep::CoreML::default().build()],
        #[cfg(feature = "cuda")]
        "cuda" => vec![ep::CUDA::default().build()],
        #[cfg(feature = "directml")]
        "directml" | "dml" => vec![ep::DirectML::default().build()],
        #[cfg(feature = "openvino")]
        "openvino" => vec![ep::OpenVINO::default().build()],
        #[cfg(feature = "tensorrt")]
        "tensorrt" => vec![ep::TensorRT::default().build()],
        #[cfg(feature = "xnnpack")]
        "xnnpack" => vec![ep::XNNPACK::default().build()],
        _ => {
            return Err(format!("this build has no execution provider {name}; Cargo.toml has features for some").into());
        }
    };
    // Otherwise ort goes on with the CPU where the provider does not work.
    Ok(providers.into_iter().map(|provider| provider.error_on_failure()).collect())
}

fn main() -> ExitCode {
    match decode() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Tokens go to standard output, a line for each sequence; returns whether all was as expected.
fn decode() -> Result<bool> {
    let mut given = Options { sampling: Sampling { top_k: 50, ..Sampling::default() }, ..Options::default() };
    let mut arguments = env::args().skip(1);
    while let Some(name) = arguments.next() {
        if name == "--help" {
            println!("{HELP}");
            return Ok(true);
        }
        given.set(&name, &arguments.next().ok_or_else(|| format!("{name} needs a value"))?)?;
    }
    given.check()?;
    // Projects of one name share a program where they share a target folder: `cargo run` says which of them runs.
    let project = env::var("CARGO_MANIFEST_DIR").unwrap_or_else(|_| env!("CARGO_MANIFEST_DIR").into());
    let file = given.contract.clone().unwrap_or_else(|| Path::new(&project).join("contract.json"));
    let environment = ort::init().build()?;
    let mut decoder = Decoder::open(&environment, &given.model, Contract::read(&file)?, given.settings.clone())?;
    if let Some(record) = &given.record {
        let runs = given.runs.unwrap_or_else(|| file.with_file_name("vectors.json"));
        return runs::record(&mut decoder, &runs, record);
    }
    if let Some(source) = given.source(decoder.contract())? {
        source.encode(&mut decoder, Path::new(""))?;
    }
    let mut generation = decoder.contract().generation.clone();
    generation.most = given.most.unwrap_or(20);
    generation.end = given.stop.unwrap_or(generation.end);
    let mut sampler = Sampler::new(given.sampling);
    let choose = |logits: &[f32], tokens: &[i64]| Ok(sampler.choose(logits, tokens));
    for row in decoder.generate(&given.prompts, &generation, choose, |_| ControlFlow::Continue(()))? {
        println!("{}", row.iter().map(i64::to_string).collect::<Vec<_>>().join(","));
    }
    Ok(true)
}
