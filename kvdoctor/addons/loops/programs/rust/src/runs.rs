//! What is decoded from the command line, or played from a file of runs with a trace of their calls.

use std::error::Error;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use decode_loop::{Decoder, Trace, likeliest};
use serde::Deserialize;
use serde_json::json;

use crate::Result;

const SCHEMA: &str = "kvdoctor/loop-vectors/1";

#[derive(Deserialize)]
struct Vectors {
    schema: String,
    runs: Vec<Run>,
}

/// Prompts, and ids to follow whatever is likeliest.
#[derive(Default, Deserialize)]
pub struct Run {
    name: String,
    pub prompts: Vec<Vec<i64>>,
    #[serde(default)]
    pub follow: Vec<Vec<i64>>,
    pub source: Option<Source>,
    /// The likeliest tokens of each sequence; -1 where any is right.
    expect: Vec<Vec<i64>>,
    /// What is tried after the last step: `rewind`, `reorder`, or both with a comma.
    pub self_test: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
pub enum Source {
    Ids(Vec<Vec<i64>>),
    /// A file of float32, little endian.
    Floats {
        file: PathBuf,
        shape: Vec<usize>,
    },
}

impl Run {
    /// Gives the source to the decoder; files are relative to a folder.
    pub fn encode(&self, decoder: &mut Decoder, folder: &Path) -> Result<()> {
        match &self.source {
            Some(Source::Ids(rows)) => decoder.encode_ids(rows)?,
            Some(Source::Floats { file, shape }) => {
                let bytes = fs::read(folder.join(file)).map_err(|error| format!("{}: {error}", file.display()))?;
                let (values, rest) = bytes.as_chunks::<4>();
                if !rest.is_empty() {
                    return Err(format!("{}: {} bytes are not float32", file.display(), bytes.len()).into());
                }
                let values: Vec<f32> = values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
                decoder.encode(&values, shape, None)?;
            }
            None => {}
        }
        Ok(())
    }

    /// The likeliest token after the prompt and after each id to follow. `on_step` is called after each step.
    pub fn follow(&self, decoder: &mut Decoder, mut on_step: impl FnMut()) -> Result<Vec<Vec<i64>>> {
        let steps = self.follow.first().map_or(0, Vec::len);
        let unequal = self.follow.iter().any(|row| row.len() != steps);
        if unequal || !self.follow.is_empty() && self.follow.len() != self.prompts.len() {
            return Err("give --follow once for each --prompt, with ids of the same number".into());
        }
        let mut logits = decoder.prefill(&self.prompts)?;
        let mut made = vec![Vec::new(); logits.rows()];
        for step in 0..=steps {
            on_step();
            for (row, made) in made.iter_mut().enumerate() {
                made.push(likeliest(&logits.last(row)));
            }
            if step < steps {
                logits = decoder.step(&self.follow.iter().map(|row| [row[step]]).collect::<Vec<_>>())?;
            }
        }
        for test in self.self_test.iter().flat_map(|tests| tests.split(',')) {
            self.try_again(test, decoder, &made)?;
        }
        Ok(made)
    }

    /// Takes the last step again after going back, and after changing rows: the likeliest tokens must be the same.
    fn try_again(&self, test: &str, decoder: &mut Decoder, made: &[Vec<i64>]) -> Result<()> {
        let mut order: Vec<usize> = (0..made.len()).collect();
        if self.follow.first().is_none_or(Vec::is_empty) {
            return Err("a self-test needs ids to follow".into());
        }
        decoder.rewind(1)?;
        match test {
            "rewind" => {}
            "reorder" => {
                order = (0..made.len()).rev().chain([0]).collect(); // backwards, and the first once more
                decoder.reorder(&order)?;
            }
            _ => return Err(format!("--self-test has rewind and reorder, not {test}").into()),
        }
        let last = |rows: &[Vec<i64>]| order.iter().map(|row| rows[*row][rows[*row].len() - 1]).collect::<Vec<_>>();
        let logits = decoder.step(&last(&self.follow).into_iter().map(|id| [id]).collect::<Vec<_>>())?;
        let (got, expected): (Vec<_>, _) =
            ((0..logits.rows()).map(|row| likeliest(&logits.last(row))).collect(), last(made));
        if got != expected {
            return Err(format!("{test}: {got:?} in place of {expected:?}").into());
        }
        Ok(())
    }

    /// The first token that is not as expected.
    fn difference(&self, tokens: &[Vec<i64>]) -> Option<String> {
        for (row, expected) in self.expect.iter().enumerate() {
            let tokens = tokens.get(row).map_or(&[][..], Vec::as_slice);
            if tokens.len() != expected.len() {
                return Some(format!("sequence {row}: {} tokens in place of {}", tokens.len(), expected.len()));
            }
            let differs = |(token, expected): (&i64, &i64)| *expected >= 0 && token != expected;
            if let Some(step) = tokens.iter().zip(expected).position(differs) {
                let (token, expected) = (tokens[step], expected[step]);
                return Some(format!("sequence {row}, step {step}: token {token} in place of {expected}"));
            }
        }
        None
    }
}

/// Plays all runs of a file, and writes the trace; returns whether all tokens are as expected.
pub fn record(decoder: &mut Decoder, runs: &Path, file: &Path) -> Result<bool> {
    let text = fs::read_to_string(runs).map_err(|error| format!("{}: {error}", runs.display()))?;
    let vectors: Vectors = serde_json::from_str(&text).map_err(|error| format!("{}: {error}", runs.display()))?;
    if vectors.schema != SCHEMA {
        return Err(format!("{}: the schema is {}, not {SCHEMA}", runs.display(), vectors.schema).into());
    }
    let place = |file: &Path| fs::canonicalize(file).ok();
    if place(file).is_some_and(|file| Some(file) == place(runs)) {
        return Err("--record is the file of --runs itself".into());
    }
    let mut lines = File::create(file).map_err(|error| format!("{}: {error}", file.display()))?;
    writeln!(lines, "{}", text.trim().replace('\n', " "))?; // the runs that are due
    let mut all = true;
    for run in vectors.runs {
        decoder.reset();
        decoder.set_trace(Some(Trace::new(lines.try_clone()?, Some(&run.name))));
        let encoded = run.encode(decoder, runs.parent().unwrap_or(Path::new("")));
        let made = encoded.and_then(|()| run.follow(decoder, || ()));
        decoder.set_trace(None);
        let (tokens, error) = match made {
            Ok(tokens) => (tokens, None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        let problem = match &error {
            Some(error) => Some(format!("error: {}", error.replace('\n', " "))),
            None => run.difference(&tokens),
        };
        writeln!(lines, "{}", json!({"run": run.name, "tokens": tokens, "error": error}))?;
        writeln!(io::stdout(), "{}: {}", run.name, problem.as_deref().unwrap_or("as expected"))?;
        all &= problem.is_none();
    }
    Ok(all)
}

/// The number that an option has.
pub fn number<T: FromStr<Err: Error>>(name: &str, text: &str) -> Result<T> {
    text.trim().parse().map_err(|error| format!("{name} {text}: {error}").into())
}

/// Numbers with commas between them.
pub fn numbers<T: FromStr<Err: Error>>(name: &str, text: &str) -> Result<Vec<T>> {
    text.split(',').filter(|part| !part.is_empty()).map(|part| number(name, part)).collect()
}
