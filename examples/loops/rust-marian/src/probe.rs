//! Runs a probe of `kvdoctor probe`: decodings whose tokens are known, with a trace of their calls.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use decode_loop::trace::{Trace, json};
use decode_loop::{Decoder, Result};

use crate::request::{Request, numbers};

/// Stands in `--expect` where any token is right.
const ANY: i64 = -1;

/// One line of a probe.
#[derive(Default)]
struct Run {
    name: String,
    request: Request,
    expected: Vec<Vec<i64>>,
}

/// Runs all lines of a probe, and writes the result; returns whether all tokens are as expected.
pub fn run(decoder: &mut Decoder, probe: &Path, result: &Path) -> Result<bool> {
    let text = fs::read_to_string(probe);
    let text = text.map_err(|error| format!("{}: {error}", probe.display()))?;
    let mut runs = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let run = Run::parse(line);
        let place = |error| format!("{}, line {}: {error}", probe.display(), number + 1);
        runs.push(run.map_err(place)?);
    }
    if runs.is_empty() {
        return Err(format!("{}: there is no run", probe.display()).into());
    }
    let place = |file: &Path| fs::canonicalize(file).ok();
    if place(result).is_some_and(|result| Some(result) == place(probe)) {
        return Err("--result is the file of --probe itself".into());
    }
    let lines = File::create(result);
    let mut lines = lines.map_err(|error| format!("{}: {error}", result.display()))?;
    let mut all = true;
    for run in runs {
        let name = &run.name;
        let (tokens, error) = match run.decode(decoder, lines.try_clone()?) {
            Ok(tokens) => (tokens, None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        let problem = match &error {
            Some(error) => Some(format!("error: {}", error.replace('\n', " "))),
            None => run.difference(&tokens),
        };
        let (run, error) = (json(name), error.map_or_else(|| "null".into(), |error| json(&error)));
        let line = format!("{{\"run\":{run},\"tokens\":{tokens:?},\"error\":{error}}}\n");
        lines.write_all(line.as_bytes())?;
        writeln!(io::stdout(), "{name}: {}", problem.as_deref().unwrap_or("as expected"))?;
        all &= problem.is_none();
    }
    decoder.set_trace(None);
    Ok(all)
}

impl Run {
    /// Reads a line of a probe.
    fn parse(line: &str) -> Result<Self> {
        let mut run = Self::default();
        let mut words = line.split(' ');
        while let Some(option) = words.next() {
            let value = words.next().ok_or_else(|| format!("{option} needs a value"))?;
            match option {
                "--run" => run.name = value.into(),
                "--expect" => run.expected.push(numbers(option, value)?),
                _ => run.request.set(option, value.into())?,
            }
        }
        // One token after the prompt, and one after each that follows.
        let tokens = run.request.follow.first().map_or(1, |row| row.len() + 1);
        if run.name.is_empty()
            || run.expected.len() != run.request.prompts.len()
            || run.expected.iter().any(|row| row.len() != tokens)
        {
            return Err("a run needs a name, and for each --prompt one --expect".into());
        }
        Ok(run)
    }

    /// The likeliest tokens of each sequence.
    fn decode(&self, decoder: &mut Decoder, lines: File) -> Result<Vec<Vec<i64>>> {
        decoder.set_trace(Some(Trace::new(lines, Some(&self.name))));
        decoder.reset();
        self.request.encode(decoder)?;
        self.request.follow(decoder, || ())
    }

    /// The first token that is not as expected.
    fn difference(&self, tokens: &[Vec<i64>]) -> Option<String> {
        for (row, (tokens, expected)) in tokens.iter().zip(&self.expected).enumerate() {
            for (step, (token, expected)) in tokens.iter().zip(expected).enumerate() {
                if *expected != ANY && token != expected {
                    let place = format!("sequence {row}, step {step}");
                    return Some(format!("{place}: token {token} in place of {expected}"));
                }
            }
        }
        None
    }
}
