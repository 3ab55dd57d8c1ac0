//! Decodes from the command line: token ids in, token ids out. `--help` lists the options.

mod runs;

use std::collections::HashMap;
use std::env;
use std::error::Error;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use decode_loop::ort::ep;
use decode_loop::{Contract, Decoder, Generation, Sampler, Sampling, Settings, ort};

use runs::Call;

/// What goes wrong here ends the program with its text.
type Result<T> = std::result::Result<T, Box<dyn Error>>;

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
  --repetition-penalty X on tokens that are there already (1)
  --seed N             of the sampling (0)
  --capacity N         room of the cache in tokens, where the contract leaves it open (512)
  --threads N          threads of a session
  --provider NAME      execution provider (cpu)
  --record FILE        play the runs, and write a trace for kvdoctor step-test --trace
  --runs FILE          runs to play (vectors.json next to the contract)";

/// The values of each option, in the order in which they were given.
struct Options(HashMap<String, Vec<String>>);

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self> {
        let mut given: HashMap<_, Vec<_>> = HashMap::new();
        while let Some(name) = arguments.next() {
            if !HELP.contains(&format!("\n  {name} ")) {
                return Err(format!("there is no option {name}; --help lists them").into());
            }
            let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
            given.entry(name).or_default().push(value);
        }
        Ok(Self(given))
    }

    fn all(&self, name: &str) -> &[String] {
        self.0.get(name).map_or(&[], Vec::as_slice)
    }

    /// A value as a number, a path or a text, where it was given.
    fn get<T: FromStr<Err: Error>>(&self, name: &str) -> Result<Option<T>> {
        let value = |text: &String| text.trim().parse().map_err(|error| format!("{name} {text}: {error}").into());
        self.all(name).last().map(value).transpose()
    }

    /// Each value as numbers with commas between them.
    fn rows<T: FromStr<Err: Error>>(&self, name: &str) -> Result<Vec<Vec<T>>> {
        let number = |part: &str| part.trim().parse().map_err(|error| format!("{name} {part}: {error}").into());
        let row = |text: &String| text.split(',').filter(|part| !part.is_empty()).map(number).collect();
        self.all(name).iter().map(row).collect()
    }

    /// The call that gives the source to the decoder: a file where its shape is given, else ids.
    fn source(&self) -> Result<Option<Call>> {
        match (self.get("--source")?, self.rows("--source-shape")?.pop()) {
            (None, _) => Ok(None),
            (Some(file), Some(shape)) => Ok(Some(Call::EncodeFile { file, shape })),
            (Some(_), None) => Ok(Some(Call::Encode { rows: self.rows("--source")? })),
        }
    }
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
    if env::args().any(|argument| argument == "--help") {
        println!("{HELP}");
        return Ok(true);
    }
    let given = Options::parse(env::args().skip(1))?;
    let prompts = given.rows("--prompt")?;
    let (record, most) = (given.get::<PathBuf>("--record")?, given.get("--most")?.unwrap_or(20));
    let sampling = Sampling {
        temperature: given.get("--temperature")?.unwrap_or(0.0),
        top_k: given.get("--top-k")?.unwrap_or(50),
        top_p: given.get("--top-p")?.unwrap_or(1.0),
        min_p: given.get("--min-p")?.unwrap_or(0.0),
        repetition_penalty: given.get("--repetition-penalty")?.unwrap_or(1.0),
        seed: given.get("--seed")?.unwrap_or(0),
    };
    if record.is_some() != prompts.is_empty()
        || most == 0
        || sampling.temperature.is_nan()
        || sampling.temperature < 0.0
    {
        return Err("give a --prompt or a --record, a --most of 1 or more, and a --temperature of 0 or more".into());
    }
    let settings = Settings {
        providers: find_provider(&given.get::<String>("--provider")?.unwrap_or("cpu".into()))?,
        threads: given.get("--threads")?,
        capacity: given.get("--capacity")?.unwrap_or(512),
    };
    let folder: PathBuf = given.get("--model")?.ok_or("give the --model folder")?;
    // Projects of one name share a program where they share a target folder: `cargo run` says which of them runs.
    let project = env::var("CARGO_MANIFEST_DIR").unwrap_or_else(|_| env!("CARGO_MANIFEST_DIR").into());
    let file = given.get("--contract")?.unwrap_or_else(|| Path::new(&project).join("contract.json"));
    let environment = ort::init().build()?;
    let mut decoder = Decoder::open(&environment, folder, Contract::read(&file)?, settings)?;
    if let Some(record) = record {
        let runs = given.get("--runs")?.unwrap_or_else(|| file.with_file_name("vectors.json"));
        return runs::record(&mut decoder, &runs, &record);
    }
    if let Some(source) = given.source()? {
        source.make(&mut decoder, Path::new(""))?;
    }
    let mut generation = Generation { most, ..decoder.contract().generation.clone() };
    if let Some(end) = given.rows("--stop")?.pop() {
        generation.end = end;
    }
    let mut sampler = Sampler::new(sampling);
    let choose = |logits: &[f32], tokens: &[i64]| Ok(sampler.choose(logits, tokens));
    for row in decoder.generate(&prompts, &generation, choose, |_| ControlFlow::Continue(()))? {
        println!("{}", row.iter().map(i64::to_string).collect::<Vec<_>>().join(","));
    }
    Ok(true)
}
