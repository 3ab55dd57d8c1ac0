//! Decodes from the command line: token ids in, token ids out. `--help` lists the options.

use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use decode_loop::{Decoder, likeliest};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const HELP: &str = "Token ids in, token ids out.

  --model FOLDER       folder of the model files
  --prompt IDS         ids with commas; once a sequence
  --source IDS         ids for the encoder; once a sequence
  --most N             the most new tokens (20)
  --stop IDS           ids that end a sequence, with commas
  --follow IDS         continue with these ids whatever is likeliest; once a sequence
  --temperature T      0 takes the likeliest token, otherwise sampled (0)
  --top-k N            sample from so many tokens (50)
  --seed N             of the sampling (0)
  --self-test TESTS    with --follow: also rewind,reorder, and compare
";

struct Options {
    help: bool,
    model: Option<PathBuf>,
    prompts: Vec<Vec<i64>>,
    sources: Vec<Vec<i64>>,
    most: usize,
    stop: Vec<i64>,
    follow: Vec<Vec<i64>>,
    temperature: f32,
    top_k: usize,
    seed: u64,
    self_test: String,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = OsString>) -> Result<Self> {
        let mut options = Self {
            help: false,
            model: None,
            prompts: Vec::new(),
            sources: Vec::new(),
            most: 20,
            stop: Vec::new(),
            follow: Vec::new(),
            temperature: 0.0,
            top_k: 50,
            seed: 0,
            self_test: String::new(),
        };
        while let Some(name) = arguments.next() {
            let name = name.to_string_lossy().into_owned();
            if name == "--help" || name == "-h" {
                options.help = true;
                return Ok(options);
            }
            let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
            let text = value.to_string_lossy().into_owned();
            let bad = |error: Box<dyn Error + Send + Sync>| format!("{name} {text}: {error}");
            match name.as_str() {
                "--model" => options.model = Some(value.into()),
                "--prompt" => options.prompts.push(numbers(&text).map_err(bad)?),
                "--source" => options.sources.push(numbers(&text).map_err(bad)?),
                "--most" => options.most = number(&text).map_err(bad)?,
                "--stop" => options.stop = numbers(&text).map_err(bad)?,
                "--follow" => options.follow.push(numbers(&text).map_err(bad)?),
                "--temperature" => options.temperature = number(&text).map_err(bad)?,
                "--top-k" => options.top_k = number(&text).map_err(bad)?,
                "--seed" => options.seed = number(&text).map_err(bad)?,
                "--self-test" => options.self_test = text,
                _ => return Err(format!("there is no option {name}; --help lists them").into()),
            }
        }
        if options.prompts.is_empty() {
            return Err("give at least one --prompt; --help lists the options".into());
        }
        Ok(options)
    }
}

fn number<T: std::str::FromStr<Err: Error + Send + Sync + 'static>>(text: &str) -> Result<T> {
    Ok(text.trim().parse()?)
}

/// Numbers with commas between them.
fn numbers<T: std::str::FromStr<Err: Error + Send + Sync + 'static>>(text: &str) -> Result<Vec<T>> {
    text.split(',').filter(|part| !part.is_empty()).map(number).collect()
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Tokens go to standard output, a line for each sequence, and measurements to standard error.
fn run() -> Result<()> {
    let given = Options::parse(std::env::args_os().skip(1))?;
    if given.help {
        write!(io::stdout(), "{HELP}")?;
        return Ok(());
    }
    let mut decoder = Decoder::open(given.model.as_ref().ok_or("give the --model folder")?)?;
    let began = Instant::now();
    decoder.encode(&given.sources, None)?;
    let mut times = Vec::new();
    let made = if !given.follow.is_empty() {
        let made = follow(&mut decoder, &given, &mut times)?;
        self_test(&mut decoder, &given, &made)?;
        made
    } else {
        let mut sampler = Sampler::new(&given);
        let choose = |logits: &[f32]| sampler.choose(logits);
        let on_token = |_, _| times.push(Instant::now());
        decoder.generate(&given.prompts, given.most, &given.stop, choose, on_token)?
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
        let peak = peak_mib();
        eprintln!("first token {first_ms:.1} ms, {rate:.1} tokens/s, peak memory {peak} MiB");
    }
    Ok(())
}

/// The likeliest token after the prompt and after each given one, whatever was likeliest before.
fn follow(
    decoder: &mut Decoder,
    given: &Options,
    times: &mut Vec<Instant>,
) -> Result<Vec<Vec<i64>>> {
    let (rows, steps) = (given.follow.len(), given.follow[0].len());
    if rows != given.prompts.len() || given.follow.iter().any(|row| row.len() != steps) {
        return Err("give --follow once for each --prompt, with ids of the same number".into());
    }
    let mut logits = decoder.prefill(&given.prompts)?;
    let mut made = vec![Vec::new(); logits.len()];
    for step in 0..=steps {
        times.push(Instant::now());
        for (row, logits) in made.iter_mut().zip(&logits) {
            row.push(likeliest(logits));
        }
        if step < steps {
            let tokens: Vec<[i64; 1]> = given.follow.iter().map(|row| [row[step]]).collect();
            logits = decoder.step(&tokens)?;
        }
    }
    Ok(made)
}

/// Takes the last step again after going back, and after changing rows: the likeliest tokens must
/// be the same.
fn self_test(decoder: &mut Decoder, given: &Options, made: &[Vec<i64>]) -> Result<()> {
    let last = |row: &usize| given.follow[*row].last().map(|token| [*token]);
    let expected = |row: &usize| made[*row].last().copied();
    let mut order: Vec<usize> = (0..made.len()).collect();
    for test in given.self_test.split(',').filter(|test| !test.is_empty()) {
        decoder.rewind(1)?;
        match test {
            "rewind" => (),
            "reorder" => {
                order = (0..made.len()).rev().chain([0]).collect(); // backwards, and the first once more
                decoder.reorder(&order)?;
            }
            _ => return Err(format!("there is no self-test {test}").into()),
        }
        let tokens: Option<Vec<[i64; 1]>> = order.iter().map(last).collect();
        let logits = decoder.step(&tokens.ok_or("a self-test needs ids to follow")?)?;
        let got: Vec<Option<i64>> = logits.iter().map(|row| Some(likeliest(row))).collect();
        let expected: Vec<Option<i64>> = order.iter().map(expected).collect();
        if got != expected {
            return Err(format!("{test}: {got:?} in place of {expected:?}").into());
        }
    }
    Ok(())
}

/// Picks a token from the likeliest, by their probabilities at a temperature.
struct Sampler {
    temperature: f32,
    top_k: usize,
    state: u64,
}

impl Sampler {
    fn new(given: &Options) -> Self {
        Self { temperature: given.temperature, top_k: given.top_k.max(1), state: given.seed }
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

/// The largest resident memory of this process so far in MiB; 0 where the system does not tell.
fn peak_mib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) / 1024
}
