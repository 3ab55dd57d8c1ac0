//! What a call is fed: each rule of the contract.

use ort::value::DynTensor;

use crate::contract::{Axis, Call, Dim, Input, Rule};
use crate::graphs::{Feeds, Tensors};
use crate::tensors::{size, tensor};
use crate::{Error, Result};

/// What the calls of a batch of sequences depend on.
#[derive(Default)]
pub struct State {
    /// Tokens in the cache, padding counted.
    pub length: usize,
    /// How many tokens of each sequence are padding, on the left.
    pub padding: Vec<usize>,
    /// The values to feed next, by the names of the pasts; where there is none it is the encoded one.
    pub cache: Tensors,
    /// What the encoder put into the cache, its states, or the source itself where no graph reads it: with these the
    /// next sequences begin as well.
    pub encoded: Tensors,
    /// The rows of the source that the sequences are about.
    pub rows: Vec<usize>,
    /// How many positions of the source there are.
    pub source_length: usize,
    /// A row for each row of the source, with 0 for padding on the right.
    pub source_mask: Option<Vec<Vec<i64>>>,
    /// The most tokens that the cache has room for.
    pub capacity: Option<usize>,
}

/// What each axis and number counts, in the order of `Axis`.
pub struct Sizes([usize; 12]);

impl Sizes {
    pub fn of(&self, axis: Axis) -> usize {
        self.0[axis as usize]
    }

    pub fn shape(&self, dims: &[Dim]) -> Vec<usize> {
        let size = |dim: &Dim| match dim {
            Dim::Size(size) => *size,
            Dim::Axis(axis) => self.of(*axis),
        };
        dims.iter().map(size).collect()
    }
}

impl State {
    /// The sizes of a call on so many tokens of each sequence; a sequence has `heads` entries of a slot.
    pub fn sizes(&self, new: usize, encoder: usize, heads: usize) -> Sizes {
        let (batch, past, total) = (self.rows.len(), self.length, self.length + new);
        let capacity = self.capacity.unwrap_or(1);
        let (last, last_new) = (total.saturating_sub(1), new.saturating_sub(1));
        Sizes([batch, batch * heads, new, past, total, capacity, encoder, self.source_length, last, last_new, 0, 1])
    }

    /// A value of the cache, or of the encoder.
    pub fn value(&self, name: &String) -> Option<&DynTensor> {
        self.cache.get(name).or_else(|| self.encoded.get(name))
    }

    /// All inputs of a call; `embedded` is what the embedding graph made of the new tokens.
    pub fn feeds<'a>(&'a self, call: &'a Call, ids: &[i64], embedded: &'a Tensors) -> Result<Feeds<'a>> {
        let missing = |name| Error::Argument(format!("there is nothing to feed to {name:?}: begin with encode()"));
        let states =
            call.encoder.as_ref().and_then(|encoder| Some((self.value(encoder.name.as_ref()?)?, encoder.axis)));
        let encoder = states.map_or(self.source_length, |(states, axis)| size(states, axis));
        let sizes = self.sizes(ids.len().checked_div(self.rows.len()).unwrap_or(0), encoder, 1);
        let mut feeds = Feeds::with_capacity(call.inputs.len() + call.pasts.len());
        for one in &call.inputs {
            let there = match one.rule {
                Rule::Embeddings => embedded.get(one.made.as_ref().unwrap_or(&one.name)),
                Rule::EncoderStates | Rule::EncoderInput => self.value(one.made.as_ref().unwrap_or(&one.name)),
                _ => {
                    let shape = sizes.shape(&one.dims);
                    let values = self.values(one, &sizes, &shape, ids);
                    feeds.push((&one.name, tensor(one.dtype, &shape, &values)?.into()));
                    continue;
                }
            };
            feeds.push((&one.name, there.ok_or_else(|| missing(&one.name))?.into()));
        }
        for name in &call.pasts {
            feeds.push((name, self.value(name).ok_or_else(|| missing(name))?.into()));
        }
        Ok(feeds)
    }

    /// The elements of an input that is made for a call.
    fn values(&self, one: &Input, sizes: &Sizes, shape: &[usize], ids: &[i64]) -> Vec<f64> {
        let (past, count) = (sizes.of(Axis::Past), shape.iter().product());
        match one.rule {
            Rule::Tokens => ids.iter().map(|id| *id as f64).collect(),
            Rule::TokenAndPosition => ids.iter().flat_map(|id| [*id as f64, past as f64]).collect(),
            Rule::Rows => (0..count).map(|row| row as f64).collect(),
            Rule::Positions => self.by_row(one, shape, |row, padding| {
                row.iter_mut().zip(past..).for_each(|(value, at)| *value = at.saturating_sub(padding) as f64);
            }),
            Rule::Mask => {
                let (total, columns) = (sizes.of(Axis::Total), shape[shape.len() - 1]);
                let queries = shape.iter().rev().nth(1).copied().unwrap_or(1);
                // Where the columns count from the right, the last token is in the last one.
                let oldest = if one.from_right { columns as i64 - total as i64 } else { 0 };
                let place = |column: usize| (oldest + column as i64).clamp(0, columns as i64) as usize;
                let mut ends = (0..).map(|row| one.rows_from.map(|axis| sizes.of(axis) + row % queries + 1));
                self.by_row(one, shape, |row, padding| {
                    let end = ends.next().flatten();
                    row.fill(one.hidden);
                    let begin = place(if end.is_some() { 0 } else { padding });
                    row[begin..place(end.unwrap_or(total)).max(begin)].fill(one.shown);
                })
            }
            Rule::EncoderMask => {
                let rows = self.source_mask.iter().flat_map(|mask| self.rows.iter().filter_map(|row| mask.get(*row)));
                let mask: Vec<f64> = rows.flatten().map(|shown| *shown as f64).collect();
                // Where the encoder shortens what it reads, all states count.
                if mask.len() == count { mask } else { vec![1.0; count] }
            }
            _ => vec![sizes.of(one.count) as f64 + one.value; count],
        }
    }

    /// The elements of a tensor, from a function that fills a row with the padding of its sequence.
    fn by_row(&self, one: &Input, shape: &[usize], mut fill: impl FnMut(&mut [f64], usize)) -> Vec<f64> {
        let columns = shape.last().copied().unwrap_or(1).max(1);
        let each = one.batch_axis.map(|axis| shape[axis + 1..].iter().product::<usize>().max(1));
        let mut values = vec![0.0; shape.iter().product()];
        for (at, row) in values.chunks_mut(columns).enumerate() {
            let padding = each.and_then(|each| self.padding.get(at * columns / each % self.rows.len()));
            fill(row, padding.copied().unwrap_or(0));
        }
        values
    }
}
