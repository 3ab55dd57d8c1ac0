//! What is decoded: the prompts, and the options that go with them.

use std::error::Error;
use std::ffi::OsString;
use std::str::FromStr;

use decode_loop::{Decoder, Result, likeliest};

const SELF_TESTS: &[&str] = &["rewind", "reorder"];

#[derive(Default)]
pub struct Request {
    pub prompts: Vec<Vec<i64>>,
    pub sources: Vec<Vec<i64>>,
    pub follow: Vec<Vec<i64>>,
    pub self_tests: Vec<String>,
}

impl Request {
    /// Sets an option.
    pub fn set(&mut self, name: &str, value: OsString) -> Result<()> {
        let text = value.to_string_lossy();
        match name {
            "--prompt" => self.prompts.push(numbers(name, &text)?),
            "--source" => self.sources.push(numbers(name, &text)?),
            "--follow" => self.follow.push(numbers(name, &text)?),
            "--self-test" => self.self_tests = self_tests(&text)?,
            _ => return Err(format!("there is no option {name}; --help lists them").into()),
        }
        Ok(())
    }

    /// Gives the sources to the decoder; shorter ones are padded on the right.
    pub fn encode(&self, decoder: &mut Decoder) -> Result<()> {
        if self.sources.iter().any(Vec::is_empty) {
            return Err("a --source needs at least one id".into());
        }
        let longest = self.sources.iter().map(Vec::len).max().ok_or("give a --source")?;
        let padded = |mut row: Vec<i64>| {
            row.resize(longest, 0);
            row
        };
        let mask: Vec<_> = self.sources.iter().map(|row| padded(vec![1; row.len()])).collect();
        let sources: Vec<_> = self.sources.iter().cloned().map(padded).collect();
        decoder.encode(&sources, Some(&mask))
    }

    /// The likeliest token after the prompt and after each id to follow, whatever was likeliest
    /// before. `on_step` is called after each step.
    pub fn follow(
        &self,
        decoder: &mut Decoder,
        mut on_step: impl FnMut(),
    ) -> Result<Vec<Vec<i64>>> {
        let (rows, steps) = (self.follow.len(), self.follow.first().map_or(0, Vec::len));
        let unequal = self.follow.iter().any(|row| row.len() != steps);
        if unequal || rows != 0 && rows != self.prompts.len() {
            return Err("give --follow once for each --prompt, with ids of the same number".into());
        }
        let mut logits = decoder.prefill(&self.prompts)?;
        let mut made = vec![Vec::new(); logits.len()];
        for step in 0..=steps {
            on_step();
            for (row, logits) in made.iter_mut().zip(&logits) {
                row.push(likeliest(logits));
            }
            if step < steps {
                let tokens: Vec<[i64; 1]> = self.follow.iter().map(|row| [row[step]]).collect();
                logits = decoder.step(&tokens)?;
            }
        }
        self.self_test(decoder, &made)?;
        Ok(made)
    }

    /// Takes the last step again after going back, and after changing rows: the likeliest tokens
    /// must be the same.
    fn self_test(&self, decoder: &mut Decoder, made: &[Vec<i64>]) -> Result<()> {
        let ends = |rows: &[Vec<i64>]| rows.iter().filter_map(|row| row.last().copied()).collect();
        let (last, likeliest_last): (Vec<i64>, Vec<i64>) = (ends(&self.follow), ends(made));
        if !self.self_tests.is_empty() && last.is_empty() {
            return Err("a self-test needs ids to follow".into());
        }
        let mut order: Vec<usize> = (0..made.len()).collect();
        for test in &self.self_tests {
            decoder.rewind(1)?;
            if test == "reorder" {
                order = (0..made.len()).rev().chain([0]).collect(); // backwards, and the first once more
                decoder.reorder(&order)?;
            }
            let tokens: Vec<[i64; 1]> = order.iter().map(|row| [last[*row]]).collect();
            let expected: Vec<i64> = order.iter().map(|row| likeliest_last[*row]).collect();
            let got: Vec<i64> = decoder.step(&tokens)?.iter().map(|row| likeliest(row)).collect();
            if got != expected {
                return Err(format!("{test}: {got:?} in place of {expected:?}").into());
            }
        }
        Ok(())
    }
}

/// Names of self-tests with commas between them.
fn self_tests(text: &str) -> Result<Vec<String>> {
    let names = text.split(',').filter(|name| !name.is_empty());
    if let Some(name) = names.clone().find(|name| !SELF_TESTS.contains(name)) {
        return Err(format!("--self-test has {}, not {name}", SELF_TESTS.join(" and ")).into());
    }
    Ok(names.map(str::to_owned).collect())
}

/// The number that an option has.
pub fn number<T: FromStr<Err: Error>>(name: &str, text: &str) -> Result<T> {
    text.trim().parse().map_err(|error| format!("{name} {text}: {error}").into())
}

/// Numbers with commas between them.
pub fn numbers<T: FromStr<Err: Error>>(name: &str, text: &str) -> Result<Vec<T>> {
    text.split(',').filter(|part| !part.is_empty()).map(|part| number(name, part)).collect()
}
