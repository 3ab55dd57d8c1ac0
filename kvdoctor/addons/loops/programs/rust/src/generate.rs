//! Generation: an iterator of tokens, and the loop over it.

use std::borrow::Cow;
use std::ops::ControlFlow;

use crate::{Decoder, Error, Generation, Logits, Result};

/// A new token of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// The sequence.
    pub row: usize,
    pub id: i64,
}

/// Generates tokens: an item has one for each sequence that has not ended.
///
/// Whoever drops it stops there. The tokens of the last item are then not in the cache yet: the next step feeds them.
pub struct Tokens<'d, C> {
    decoder: &'d mut Decoder,
    generation: &'d Generation,
    choose: C,
    logits: Option<Logits>,
    sequences: Vec<Vec<i64>>,
    /// Where the new tokens of each sequence begin.
    begins: Vec<usize>,
    running: Vec<bool>,
}

impl<C> Tokens<'_, C> {
    /// The new tokens of each sequence so far.
    pub fn made(&self) -> Vec<Vec<i64>> {
        self.sequences.iter().zip(&self.begins).map(|(sequence, begin)| sequence[*begin..].to_vec()).collect()
    }
}

impl<C: FnMut(&[f32], &[i64]) -> Result<i64>> Tokens<'_, C> {
    fn advance(&mut self) -> Result<Vec<Token>> {
        let logits = match self.logits.take() {
            Some(logits) => logits,
            None => {
                let last = self.sequences.iter().map(|sequence| sequence.last().copied().unwrap_or(0));
                let fed = last.zip(&self.running).map(|(last, runs)| match (runs, self.generation.padding) {
                    (false, Some(padding)) => [padding],
                    _ => [last],
                });
                self.decoder.step(&fed.collect::<Vec<_>>())?
            }
        };
        let mut tokens = Vec::new();
        for row in 0..self.sequences.len() {
            if !self.running[row] {
                continue;
            }
            let id = self.next_id(row, &logits.last(row))?;
            if self.generation.end.contains(&id) {
                self.running[row] = false;
                continue;
            }
            self.sequences[row].push(id);
            let count = self.sequences[row].len() - self.begins[row];
            self.running[row] = self.generation.most == 0 || count < self.generation.most;
            tokens.push(Token { row, id });
        }
        if self.decoder.limit().is_some_and(|limit| self.decoder.length() >= limit) {
            self.running.fill(false);
        }
        Ok(tokens)
    }

    fn next_id(&mut self, row: usize, logits: &[f32]) -> Result<i64> {
        let sequence = &self.sequences[row];
        if let Some((_, id)) = self.generation.forced.iter().find(|(place, _)| *place == sequence.len()) {
            return Ok(*id);
        }
        let begins = sequence.len() == self.begins[row];
        let never = self.generation.suppress.iter().chain(self.generation.begin_suppress.iter().filter(|_| begins));
        let mut logits = Cow::Borrowed(logits);
        for id in never.filter_map(|id| usize::try_from(*id).ok()) {
            if id < logits.len() {
                logits.to_mut()[id] = f32::NEG_INFINITY;
            }
        }
        (self.choose)(&logits, sequence)
    }
}

impl<C: FnMut(&[f32], &[i64]) -> Result<i64>> Iterator for Tokens<'_, C> {
    type Item = Result<Vec<Token>>;

    fn next(&mut self) -> Option<Self::Item> {
        if !self.running.contains(&true) {
            return None;
        }
        match self.advance() {
            Ok(tokens) if tokens.is_empty() => None,
            Ok(tokens) => Some(Ok(tokens)),
            Err(error) => {
                self.running.fill(false);
                Some(Err(error))
            }
        }
    }
}

impl Decoder {
    /// Generates from the logits of `prefill` or `step`, as an iterator. `sequences` are the tokens so far.
    ///
    /// `choose` gets a row of logits and the tokens of its sequence so far, the prompt among them; what it returns
    /// as an error ends the generation. A generation ends at the limit of the decoder as well.
    pub fn tokens<'d, C: FnMut(&[f32], &[i64]) -> Result<i64>>(
        &'d mut self,
        logits: Logits,
        sequences: &[impl AsRef<[i64]>],
        generation: &'d Generation,
        choose: C,
    ) -> Result<Tokens<'d, C>> {
        if sequences.len() != logits.rows() {
            return Err(Error::Argument(format!("{} sequences for {} rows of logits", sequences.len(), logits.rows())));
        }
        let sequences: Vec<Vec<i64>> = sequences.iter().map(|sequence| sequence.as_ref().to_vec()).collect();
        Ok(Tokens {
            decoder: self,
            generation,
            choose,
            logits: Some(logits),
            begins: sequences.iter().map(Vec::len).collect(),
            running: vec![true; sequences.len()],
            sequences,
        })
    }

    /// Generates from prompts until every sequence has ended; returns the new tokens of each. `on_token` is called
    /// for each of them, and may stop it.
    pub fn generate(
        &mut self,
        prompts: &[impl AsRef<[i64]>],
        generation: &Generation,
        choose: impl FnMut(&[f32], &[i64]) -> Result<i64>,
        mut on_token: impl FnMut(Token) -> ControlFlow<()>,
    ) -> Result<Vec<Vec<i64>>> {
        let logits = self.prefill(prompts)?;
        let mut tokens = self.tokens(logits, prompts, generation, choose)?;
        for step in tokens.by_ref() {
            if step?.into_iter().try_for_each(&mut on_token).is_break() {
                break;
            }
        }
        Ok(tokens.made())
    }
}
