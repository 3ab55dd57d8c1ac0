//! The runs of `vectors.json`, played and written down with their calls.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use decode_loop::{Decoder, Logits, Trace, likeliest};
use serde::Deserialize;
use serde_json::json;

use crate::Result;

#[derive(Deserialize)]
struct Vectors {
    #[serde(rename = "schema")]
    _schema: Schema,
    runs: Vec<Run>,
}

#[derive(Deserialize)]
enum Schema {
    #[serde(rename = "kvdoctor/loop-vectors/1")]
    First,
}

/// Prompts, and ids to follow whatever is likeliest.
#[derive(Deserialize)]
struct Run {
    name: String,
    prompts: Vec<Vec<i64>>,
    follow: Vec<Vec<i64>>,
    source: Option<Source>,
    /// The likeliest tokens of each sequence; -1 where any is right.
    expect: Vec<Vec<i64>>,
    /// What is tried after the last step: `rewind` or `reorder`.
    self_test: Option<String>,
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

impl Source {
    /// Gives the source to the decoder; files are relative to a folder.
    pub fn encode(&self, decoder: &mut Decoder, folder: &Path) -> Result<()> {
        match self {
            Self::Ids(rows) => decoder.encode_ids(rows)?,
            Self::Floats { file, shape } => {
                let bytes = fs::read(folder.join(file)).map_err(|error| format!("{}: {error}", file.display()))?;
                let values: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
                decoder.encode(&values, shape, None)?;
            }
        }
        Ok(())
    }
}

impl Run {
    /// The likeliest token after the prompt and after each id to follow.
    fn play(&self, decoder: &mut Decoder, folder: &Path) -> Result<Vec<Vec<i64>>> {
        decoder.reset();
        if let Some(source) = &self.source {
            source.encode(decoder, folder)?;
        }
        let all = |logits: Logits| (0..logits.rows()).map(|row| likeliest(&logits.last(row))).collect::<Vec<_>>();
        let mut made = vec![all(decoder.prefill(&self.prompts)?)];
        let steps = self.follow.first().map_or(0, Vec::len);
        for step in 0..steps {
            let fed: Vec<_> = self.follow.iter().map(|row| [row[step]]).collect();
            made.push(all(decoder.step(&fed)?));
        }
        if let Some(test) = &self.self_test {
            // The last step again, after going back and perhaps with the rows backwards and the first once more.
            let mut order: Vec<usize> = (0..self.prompts.len()).collect();
            decoder.rewind(1)?;
            if test == "reorder" {
                order = order.into_iter().rev().chain([0]).collect();
                decoder.reorder(&order)?;
            }
            let fed: Vec<_> = order.iter().map(|row| [self.follow[*row][steps - 1]]).collect();
            let (got, expected) = (all(decoder.step(&fed)?), order.iter().map(|row| made[steps][*row]));
            if !expected.clone().eq(got.iter().copied()) {
                return Err(format!("{test}: {got:?} in place of {:?}", expected.collect::<Vec<_>>()).into());
            }
        }
        Ok((0..self.prompts.len()).map(|row| made.iter().map(|step| step[row]).collect()).collect())
    }

    /// The first token that is not as expected.
    fn difference(&self, tokens: &[Vec<i64>]) -> Option<String> {
        let rows = self.expect.iter().zip(tokens).enumerate();
        let mut steps = rows.flat_map(|(row, (expected, made))| {
            expected.iter().zip(made).enumerate().map(move |(step, pair)| (row, step, pair))
        });
        let differs = steps.find(|(_, _, (expected, made))| **expected >= 0 && expected != made);
        differs.map(|(row, step, (expected, made))| {
            format!("sequence {row}, step {step}: token {made} in place of {expected}")
        })
    }
}

/// Plays all runs of a file, and writes the trace; returns whether all tokens are as expected.
pub fn record(decoder: &mut Decoder, runs: &Path, file: &Path) -> Result<bool> {
    let text = fs::read_to_string(runs).map_err(|error| format!("{}: {error}", runs.display()))?;
    let vectors: Vectors = serde_json::from_str(&text).map_err(|error| format!("{}: {error}", runs.display()))?;
    if fs::canonicalize(file).is_ok_and(|file| fs::canonicalize(runs).is_ok_and(|runs| runs == file)) {
        return Err("--record is the file of --runs itself".into());
    }
    let mut lines = File::create(file).map_err(|error| format!("{}: {error}", file.display()))?;
    writeln!(lines, "{}", text.trim().replace('\n', " "))?; // the runs that are due
    let mut all = true;
    for run in vectors.runs {
        decoder.set_trace(Some(Trace::new(lines.try_clone()?, Some(&run.name))));
        let made = run.play(decoder, runs.parent().unwrap_or(Path::new("")));
        decoder.set_trace(None);
        let error = made.as_ref().err().map(|error| error.to_string().replace('\n', " "));
        let tokens = made.unwrap_or_default();
        let problem = error.as_ref().map(|error| format!("error: {error}")).or_else(|| run.difference(&tokens));
        writeln!(lines, "{}", json!({"run": run.name, "tokens": tokens, "error": error}))?;
        println!("{}: {}", run.name, problem.as_deref().unwrap_or("as expected"));
        all &= problem.is_none();
    }
    Ok(all)
}
