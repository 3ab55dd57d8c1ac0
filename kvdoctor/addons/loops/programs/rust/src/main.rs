//! Decodes from the command line: token ids in, token ids out. `--help` lists the options.

mod runs;

use std::collections::HashMap;
use std::env;
use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use decode_loop::ort::ep;
use decode_loop::{Contract, Decoder, Settings, Trace, ort};

/// What goes wrong here ends the program with its text.
type Result<T> = std::result::Result<T, Box<dyn Error>>;

const HELP: &str = r#"Token ids in, token ids out.

  --model FOLDER    folder of the model files
  --contract FILE   its contract (contract.json of this project)
  --provider NAME   execution provider (cpu)
  --calls JSON      calls: [{"call": "generate", "rows": [[5, 6, 7]], "most": 20}]
  --runs FILE       without --calls: runs to play (vectors.json next to the contract)
  --record FILE     write a trace for kvdoctor step-test --trace"#;

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

/// The value of each option.
fn read_options() -> Result<HashMap<String, String>> {
    let (mut given, mut arguments) = (HashMap::new(), env::args().skip(1));
    while let Some(name) = arguments.next() {
        if !HELP.contains(&format!("\n  {name} ")) {
            return Err(format!("there is no option {name}\n{HELP}").into());
        }
        let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
        given.insert(name, value);
    }
    Ok(given)
}

/// Tokens go to standard output, a line for each sequence; returns whether those of runs are as expected.
fn decode() -> Result<bool> {
    let given = read_options()?;
    let folder = given.get("--model").ok_or(HELP)?;
    // Projects of one name share a program where they share a target folder: `cargo run` says which of them runs.
    let project = env::var("CARGO_MANIFEST_DIR").unwrap_or_else(|_| env!("CARGO_MANIFEST_DIR").into());
    let contract = given.get("--contract").map_or_else(|| Path::new(&project).join("contract.json"), PathBuf::from);
    let providers = find_provider(given.get("--provider").map_or("cpu", String::as_str))?;
    let lines = given.get("--record").map(File::create).transpose()?;
    let environment = ort::init().build()?;
    let settings = Settings { providers, ..Settings::default() };
    let mut decoder = Decoder::open(&environment, folder, Contract::read(&contract)?, settings)?;
    let Some(calls) = given.get("--calls") else {
        let runs = given.get("--runs").map_or_else(|| contract.with_file_name("vectors.json"), PathBuf::from);
        return runs::play(&mut decoder, &runs, lines);
    };
    decoder.set_trace(lines.map(|mut lines| -> Trace { Box::new(move |line| writeln!(lines, "{line}")) }));
    for call in serde_json::from_str::<Vec<runs::Call>>(calls)? {
        for row in call.make(&mut decoder, Path::new(""))? {
            println!("{}", row.iter().map(i64::to_string).collect::<Vec<_>>().join(","));
        }
    }
    Ok(true)
}
