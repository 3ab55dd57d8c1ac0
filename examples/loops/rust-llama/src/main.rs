//! Decodes from the command line: token ids in, token ids out. `--help` lists the options.

mod probe;
mod request;

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use decode_loop::{Decoder, Result, Settings, likeliest};

use request::{Request, number, numbers};

const HELP: &str = "Token ids in, token ids out.

  --model FOLDER       folder of the model files
  --prompt IDS         ids with commas; once a sequence
  --most N             the most new tokens (20)
  --stop IDS           ids that end a sequence, with commas
  --follow IDS         continue with these ids whatever is likeliest; once a sequence
  --temperature T      0 takes the likeliest token, otherwise sampled (0)
  --top-k N            sample from so many tokens (50)
  --seed N             of the sampling (0)
  --self-test TESTS    with --follow: also rewind,reorder, and compare
  --provider NAME      execution provider (cpu)
  --probe FILE         run the lines of a probe in place of one --prompt
  --result FILE        result of the probe (result.jsonl)
";

struct Options {
    help: bool,
    model: Option<PathBuf>,
    settings: Settings,
    request: Request,
    probe: Option<PathBuf>,
    result: PathBuf,
    most: usize,
    stop: Vec<i64>,
    temperature: f32,
    top_k: usize,
    seed: u64,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = OsString>) -> Result<Self> {
        let mut options = Self {
            help: false,
            model: None,
            settings: Settings::default(),
            request: Request::default(),
            probe: None,
            result: "result.jsonl".into(),
            most: 20,
            stop: Vec::new(),
            temperature: 0.0,
            top_k: 50,
            seed: 0,
        };
        while let Some(name) = arguments.next() {
            let name = name.to_string_lossy();
            if name == "--help" || name == "-h" {
                options.help = true;
                return Ok(options);
            }
            let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
            options.set(&name, value)?;
        }
        options.check()?;
        Ok(options)
    }

    fn set(&mut self, name: &str, value: OsString) -> Result<()> {
        let text = value.to_string_lossy();
        match name {
            "--model" => self.model = Some(value.into()),
            "--provider" => self.settings.provider = text.into_owned(),
            "--probe" => self.probe = Some(value.into()),
            "--result" => self.result = value.into(),
            "--most" => self.most = number(name, &text)?,
            "--stop" => self.stop = numbers(name, &text)?,
            "--temperature" => self.temperature = number(name, &text)?,
            "--top-k" => self.top_k = number(name, &text)?,
            "--seed" => self.seed = number(name, &text)?,
            _ => self.request.set(name, value)?,
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        if self.probe.is_some() != self.request.prompts.is_empty() {
            return Err("give at least one --prompt, or a --probe; --help lists the options".into());
        }
        if self.most < 1 || self.top_k < 1 {
            return Err("--most and --top-k are 1 or more".into());
        }
        if self.temperature.is_nan() || self.temperature < 0.0 {
            return Err("--temperature is 0 or more".into());
        }
        if self.request.follow.is_empty() && !self.request.self_tests.is_empty() {
            return Err("--self-test needs --follow".into());
        }
        Ok(())
    }
}

fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

/// Tokens go to standard output, a line for each sequence, and measurements to standard error.
fn run() -> Result<ExitCode> {
    let given = Options::parse(std::env::args_os().skip(1))?;
    if given.help {
        write!(io::stdout(), "{HELP}")?;
        return Ok(ExitCode::SUCCESS);
    }
    let folder = given.model.as_ref().ok_or("give the --model folder")?;
    let mut decoder = Decoder::open_with(folder, &given.settings)?;
    if let Some(file) = &given.probe {
        let all = probe::run(&mut decoder, file, &given.result)?;
        return Ok(if all { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    let began = Instant::now();
    let mut times = Vec::new();
    let made = if !given.request.follow.is_empty() {
        given.request.follow(&mut decoder, || times.push(Instant::now()))?
    } else {
        let mut sampler = Sampler::new(&given);
        let choose = |logits: &[f32]| sampler.choose(logits);
        let on_token = |_, _| times.push(Instant::now());
        decoder.generate(&given.request.prompts, given.most, &given.stop, choose, on_token)?
    };
    let mut lines = io::stdout().lock();
    for row in made {
        let ids: Vec<String> = row.iter().map(i64::to_string).collect();
        writeln!(lines, "{}", ids.join(","))?;
    }
    if let (Some(first), Some(last)) = (times.first(), times.last()) {
        let first_ms = (*first - began).as_secs_f64() * 1000.0;
        let seconds = (*last - *first).as_secs_f64();
        let rate = if seconds > 0.0 { (times.len() - 1) as f64 / seconds } else { 0.0 };
        let memory = peak_memory().unwrap_or_default();
        eprintln!("first token {first_ms:.1} ms, {rate:.1} tokens/s{memory}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Picks a token from the likeliest, by their probabilities at a temperature.
struct Sampler {
    temperature: f32,
    top_k: usize,
    state: u64,
}

impl Sampler {
    fn new(given: &Options) -> Self {
        Self { temperature: given.temperature, top_k: given.top_k, state: given.seed }
    }

    fn choose(&mut self, logits: &[f32]) -> i64 {
        if self.temperature <= 0.0 {
            return likeliest(logits);
        }
        let uniform = self.uniform();
        let mut tokens: Vec<usize> = (0..logits.len()).collect();
        tokens.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        tokens.truncate(self.top_k);
        let largest = logits[tokens[0]];
        let weight = |token: &usize| ((logits[*token] - largest) / self.temperature).exp();
        let mut left = uniform * tokens.iter().map(weight).sum::<f32>();
        for token in &tokens {
            left -= weight(token);
            if left < 0.0 {
                return *token as i64;
            }
        }
        tokens[0] as i64
    }

    /// A number from 0 to 1, without 1 (SplitMix64).
    fn uniform(&mut self) -> f32 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 40) as f32 / (1 << 24) as f32
    }
}

/// `, peak memory N MiB`, the largest resident memory of this process so far; Linux tells it.
fn peak_memory() -> Option<String> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib = line.split_whitespace().next()?.parse::<u64>().ok()?;
    Some(format!(", peak memory {} MiB", kib / 1024))
}
