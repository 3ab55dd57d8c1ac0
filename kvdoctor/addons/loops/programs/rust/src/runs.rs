//! The calls of runs, as `vectors.json` has them, made and written down.

use std::fs::{self, File};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use decode_loop::{Decoder, Generation, Logits, Sampler, Sampling, Trace, likeliest};
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

/// A call of the decoder, some with the likeliest tokens that are expected after it; -1 where any is right. A file is of
/// float32, little endian.
#[derive(Deserialize)]
#[serde(tag = "call", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Call {
    Encode {
        rows: Vec<Vec<i64>>,
    },
    EncodeFile {
        file: PathBuf,
        shape: Vec<usize>,
    },
    Prefill {
        rows: Vec<Vec<i64>>,
        expect: Option<Vec<i64>>,
    },
    Step {
        rows: Vec<Vec<i64>>,
        expect: Option<Vec<i64>>,
    },
    Rewind {
        count: usize,
    },
    Reorder {
        order: Vec<usize>,
    },
    Generate {
        rows: Vec<Vec<i64>>,
        most: Option<usize>,
        stop: Option<Vec<i64>>,
        #[serde(flatten)]
        sampling: Sampling,
    },
}

impl Call {
    /// Makes the call, with files of a folder: the tokens of each sequence that it generates, or the likeliest one.
    pub fn make(&self, decoder: &mut Decoder, folder: &Path) -> Result<Vec<Vec<i64>>> {
        let best = |logits: Logits| (0..logits.rows()).map(|row| vec![likeliest(&logits.last(row))]).collect();
        match self {
            Call::Prefill { rows, .. } => return Ok(best(decoder.prefill(rows)?)),
            Call::Step { rows, .. } => return Ok(best(decoder.step(rows)?)),
            Call::Generate { sampling, .. } if sampling.temperature < 0.0 => {
                return Err("temperature is 0 or more".into());
            }
            Call::Generate { rows, most, stop, sampling } => {
                let mut generation = Generation { most: most.unwrap_or(20), ..decoder.contract().generation.clone() };
                generation.end = stop.clone().unwrap_or(generation.end);
                let mut sampler = Sampler::new(sampling.clone());
                let choose = |logits: &[f32], tokens: &[i64]| Ok(sampler.choose(logits, tokens));
                return Ok(decoder.generate(rows, &generation, choose, |_| ControlFlow::Continue(()))?);
            }
            Call::Encode { rows } => decoder.encode_ids(rows)?,
            Call::EncodeFile { file, shape } => {
                let bytes = fs::read(folder.join(file)).map_err(|error| format!("{}: {error}", file.display()))?;
                let values: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
                decoder.encode(&values, shape, None)?;
            }
            Call::Rewind { count } => decoder.rewind(*count)?,
            Call::Reorder { order } => decoder.reorder(order)?,
        }
        Ok(Vec::new())
    }
}

impl Run {
    /// The likeliest tokens after each call that expects some, and the first that are others.
    fn play(&self, decoder: &mut Decoder, folder: &Path) -> Result<(Vec<Vec<i64>>, Option<String>)> {
        decoder.reset();
        let (mut all, mut problem) = (Vec::new(), None);
        for call in &self.calls {
            let tokens = call.make(decoder, folder)?.concat();
            let (Call::Prefill { expect, .. } | Call::Step { expect, .. }) = call else { continue };
            let Some(expect) = expect else { continue };
            if problem.is_none() && expect.iter().zip(&tokens).any(|(due, token)| *due >= 0 && due != token) {
                problem = Some(format!("step {}: {tokens:?} in place of {expect:?}", all.len()));
            }
            all.push(tokens);
        }
        Ok((all, problem))
    }
}

/// Plays all runs of a file, and writes the trace; returns whether all tokens are as expected.
pub fn play(decoder: &mut Decoder, runs: &Path, lines: Option<File>) -> Result<bool> {
    let text = fs::read_to_string(runs).map_err(|error| format!("{}: {error}", runs.display()))?;
    let vectors: Vectors = serde_json::from_str(&text).map_err(|error| format!("{}: {error}", runs.display()))?;
    let write = |line: String| lines.as_ref().map_or(Ok(()), |mut lines| writeln!(lines, "{line}"));
    write(text.trim().replace('\n', " "))?; // the runs that are due
    let mut good = true;
    for run in vectors.runs {
        let (name, shared) = (json!(run.name), lines.as_ref().map(File::try_clone).transpose()?);
        decoder
            .set_trace(shared.map(|mut lines| -> Trace {
                Box::new(move |line| writeln!(lines, "{{\"run\":{name},{}", &line[1..]))
            }));
        let made = run.play(decoder, runs.parent().unwrap_or(Path::new("")));
        let error = made.as_ref().err().map(|error| error.to_string().replace('\n', " "));
        let (tokens, problem) = made.unwrap_or_default();
        let problem = error.as_ref().map(|error| format!("error: {error}")).or(problem);
        write(json!({"run": run.name, "tokens": tokens, "error": error}).to_string())?;
        println!("{}: {}", run.name, problem.as_deref().unwrap_or("as expected"));
        good &= problem.is_none();
    }
    Ok(good)
}
