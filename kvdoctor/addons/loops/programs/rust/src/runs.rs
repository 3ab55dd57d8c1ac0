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
    #[serde(rename = "kvdoctor/loop-vectors/2")]
    Second,
}

#[derive(Deserialize)]
struct Run {
    name: String,
    calls: Vec<Call>,
}

/// A call of the decoder. The likeliest tokens are to `expect` where it returns logits; -1 where any is right. A file is of
/// float32, little endian.
#[derive(Deserialize)]
#[serde(tag = "call", rename_all = "kebab-case")]
pub enum Call {
    Encode { rows: Vec<Vec<i64>> },
    EncodeFile { file: PathBuf, shape: Vec<usize> },
    Prefill { rows: Vec<Vec<i64>>, expect: Vec<i64> },
    Step { rows: Vec<Vec<i64>>, expect: Vec<i64> },
    Rewind { count: usize },
    Reorder { order: Vec<usize> },
}

impl Call {
    /// Makes the call; the logits that it returns, with the tokens that are expected. Files are relative to a folder.
    pub fn make(&self, decoder: &mut Decoder, folder: &Path) -> Result<Option<(Logits, &[i64])>> {
        match self {
            Self::Encode { rows } => decoder.encode_ids(rows)?,
            Self::EncodeFile { file, shape } => {
                let bytes = fs::read(folder.join(file)).map_err(|error| format!("{}: {error}", file.display()))?;
                let values: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
                decoder.encode(&values, shape, None)?;
            }
            Self::Prefill { rows, expect } => return Ok(Some((decoder.prefill(rows)?, expect))),
            Self::Step { rows, expect } => return Ok(Some((decoder.step(rows)?, expect))),
            Self::Rewind { count } => decoder.rewind(*count)?,
            Self::Reorder { order } => decoder.reorder(order)?,
        }
        Ok(None)
    }
}

impl Run {
    /// The likeliest tokens after each call that returns logits, and the first that are not as expected.
    fn play(&self, decoder: &mut Decoder, folder: &Path) -> Result<(Vec<Vec<i64>>, Option<String>)> {
        decoder.reset();
        let (mut all, mut problem) = (Vec::new(), None);
        for call in &self.calls {
            let Some((logits, expect)) = call.make(decoder, folder)? else { continue };
            let tokens: Vec<_> = (0..logits.rows()).map(|row| likeliest(&logits.last(row))).collect();
            if problem.is_none() && expect.iter().zip(&tokens).any(|(due, token)| *due >= 0 && due != token) {
                problem = Some(format!("step {}: {tokens:?} in place of {expect:?}", all.len()));
            }
            all.push(tokens);
        }
        Ok((all, problem))
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
    let mut good = true;
    for run in vectors.runs {
        decoder.set_trace(Some(Trace::new(lines.try_clone()?, Some(&run.name))));
        let made = run.play(decoder, runs.parent().unwrap_or(Path::new("")));
        decoder.set_trace(None);
        let error = made.as_ref().err().map(|error| error.to_string().replace('\n', " "));
        let (tokens, problem) = made.unwrap_or_default();
        let problem = error.as_ref().map(|error| format!("error: {error}")).or(problem);
        writeln!(lines, "{}", json!({"run": run.name, "tokens": tokens, "error": error}))?;
        println!("{}: {}", run.name, problem.as_deref().unwrap_or("as expected"));
        good &= problem.is_none();
    }
    Ok(good)
}
