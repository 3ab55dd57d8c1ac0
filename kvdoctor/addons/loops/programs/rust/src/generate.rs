//! Generation: an iterator of tokens, and the loop over it.

use std::borrow::Cow;
use std::ops::ControlFlow;

use crate::{Decoder, Generation, Logits, Result, refuse};

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
    sequences: Vec<Sequence>,
}

struct Sequence {
    tokens: Vec<i64>,
    /// Where the new tokens begin.
    begin: usize,
    running: bool,
}

impl<C> Tokens<'_, C> {
    /// The new tokens of each sequence so far.
    pub fn made(&self) -> Vec<Vec<i64>> {
        self.sequences.iter().map(|sequence| sequence.tokens[sequence.begin..].to_vec()).collect()
    }
}

impl<C: FnMut(&[f32], &[i64]) -> Result<i64>> Tokens<'_, C> {
    fn advance(&mut self) -> Result<Vec<Token>> {
        let generation = self.generation;
        let logits = match self.logits.take() {
            Some(logits) => logits,
            None => {
                // Of those that have ended as well: what is fed to them does not matter.
                let fed = self.sequences.iter().map(|sequence| [sequence.tokens.last().copied().unwrap_or(0)]);
                self.decoder.step(&fed.collect::<Vec<_>>())?
            }
        };
        let mut tokens = Vec::new();
        for (row, sequence) in self.sequences.iter_mut().enumerate().filter(|(_, sequence)| sequence.running) {
            let id = sequence.next_id(generation, &logits.last(row), &mut self.choose)?;
            sequence.running = !generation.end.contains(&id);
            if sequence.running {
                sequence.tokens.push(id);
                let count = sequence.tokens.len() - sequence.begin;
                sequence.running = generation.most == 0 || count < generation.most;
                tokens.push(Token { row, id });
            }
        }
        if self.decoder.length() >= self.decoder.limit() {
            self.stop();
        }
        Ok(tokens)
    }

    fn stop(&mut self) {
        self.sequences.iter_mut().for_each(|sequence| sequence.running = false);
    }
}

impl Sequence {
    fn next_id(
        &self,
        generation: &Generation,
        logits: &[f32],
        choose: &mut impl FnMut(&[f32], &[i64]) -> Result<i64>,
    ) -> Result<i64> {
        if let Some((_, id)) = generation.forced.iter().find(|(place, _)| *place == self.tokens.len()) {
            return Ok(*id);
        }
        let begins = self.tokens.len() == self.begin;
        let never = generation.suppress.iter().chain(generation.begin_suppress.iter().filter(|_| begins));
        let mut logits = Cow::Borrowed(logits);
        for id in never.map(|id| *id as usize).filter(|id| *id < logits.len()).collect::<Vec<_>>() {
            logits.to_mut()[id] = f32::NEG_INFINITY;
        }
        choose(&logits, &self.tokens)
    }
}

impl<C: FnMut(&[f32], &[i64]) -> Result<i64>> Iterator for Tokens<'_, C> {
    type Item = Result<Vec<Token>>;

    fn next(&mut self) -> Option<Self::Item> {
        if !self.sequences.iter().any(|sequence| sequence.running) {
            return None;
        }
        let made = self.advance();
        if made.is_err() {
            self.stop();
        }
        Some(made).filter(|made| !made.as_ref().is_ok_and(Vec::is_empty))
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
            return refuse(format!("{} sequences for {} rows of logits", sequences.len(), logits.rows()));
        }
        let begun = |tokens: &[i64]| Sequence { tokens: tokens.to_vec(), begin: tokens.len(), running: true };
        let sequences = sequences.iter().map(|sequence| begun(sequence.as_ref())).collect();
        Ok(Tokens { decoder: self, generation, choose, logits: Some(logits), sequences })
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
