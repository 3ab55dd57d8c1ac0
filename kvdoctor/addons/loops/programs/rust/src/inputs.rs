//! What a call is fed: each rule of the contract.

use ort::value::DynTensor;

use crate::contract::{Axis, Call, Contract, Count, Dim, Input, Rule, Slot};
use crate::graphs::{Feeds, Tensors};
use crate::tensors::{size, tensor};
use crate::{Error, Result};

/// What the calls of a batch of sequences depend on.
#[derive(Default)]
pub struct State {
    /// Tokens in the cache, padding counted.
    pub length: usize,
    /// The number of sequences.
    pub batch: usize,
    /// How many tokens of each sequence are padding, on the left.
    pub padding: Vec<usize>,
    /// The values to feed next, by the names of the pasts; where there is none it is what the encoder made.
    pub cache: Tensors,
    /// What the encoder returned, or the source itself where no graph reads it. It outlives the sequences.
    pub encoded: Tensors,
    /// How many sequences the source is for, where it has an axis for them.
    pub sources: Option<usize>,
    /// How many positions of the source there are.
    pub source_length: usize,
    /// A row for each sequence, with 0 for padding on the right.
    pub source_mask: Option<Vec<Vec<i64>>>,
    /// The most tokens that the cache has room for.
    pub capacity: Option<usize>,
}

/// The size of each axis, in the order of `Axis`.
pub struct Sizes([usize; 9]);

impl Sizes {
    fn of(&self, axis: Axis) -> usize {
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
    /// The sizes of a call on new tokens of all sequences.
    fn sizes(&self, contract: &Contract, ids: usize) -> Sizes {
        let (batch, past, capacity) = (self.batch, self.length, self.capacity.unwrap_or(1));
        let new = ids.checked_div(batch).unwrap_or(0);
        let encoder = self.encoder_length(contract).unwrap_or(self.source_length);
        Sizes([batch, batch, new, past, past + new, capacity, encoder, self.source_length, 1])
    }

    /// The sizes of a slot before the first call.
    pub fn first_sizes(&self, slot: &Slot) -> Sizes {
        let (batch, first) = (self.batch, slot.first_length);
        Sizes([batch, batch * slot.heads, 1, first, 1, self.capacity.unwrap_or(1), first, 1, 1])
    }

    /// What the encoder made for each of its states.
    fn states(&self, contract: &Contract) -> Option<&DynTensor> {
        match (&contract.calls.encode, &contract.source) {
            (Some(encode), _) => self.encoded.get(encode.states.as_ref()?),
            (None, Some(source)) if source.rule == Rule::EncoderStates => self.encoded.get(&source.name),
            _ => None,
        }
    }

    fn past(&self, contract: &Contract, name: &String) -> Option<&DynTensor> {
        self.cache.get(name).or_else(|| {
            let slot = contract.slots.iter().find(|slot| slot.past == *name)?;
            self.encoded.get(slot.made.as_ref()?)
        })
    }

    /// The number of encoder states: of those that are there, else of a slot that counts them.
    fn encoder_length(&self, contract: &Contract) -> Option<usize> {
        if let Some(states) = self.states(contract) {
            return Some(size(states, 1));
        }
        let slot = contract.slots.iter().find(|slot| slot.counts_states)?;
        let counts = self.length > 0 || slot.by_encoder;
        self.past(contract, &slot.past).filter(|_| counts).zip(slot.length_axis).map(|(value, axis)| size(value, axis))
    }

    /// All inputs of a call; `embedded` is what the embedding graph made of the new tokens.
    pub fn feeds<'a>(
        &'a self,
        contract: &'a Contract,
        call: &'a Call,
        ids: &[i64],
        embedded: &'a Tensors,
    ) -> Result<Feeds<'a>> {
        let missing = |name| Error::Argument(format!("there is nothing to feed to {name:?}: begin with encode()"));
        let sizes = self.sizes(contract, ids.len());
        let mut feeds = Feeds::with_capacity(call.inputs.len() + call.pasts.len());
        for one in &call.inputs {
            let there = match one.rule {
                Rule::Embeddings => one.made.as_ref().and_then(|made| embedded.get(made)),
                Rule::EncoderStates => self.states(contract),
                Rule::EncoderInput => self.encoded.get(&one.name),
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
            feeds.push((name, self.past(contract, name).ok_or_else(|| missing(name))?.into()));
        }
        Ok(feeds)
    }

    /// The elements of an input that is made for a call.
    fn values(&self, one: &Input, sizes: &Sizes, shape: &[usize], ids: &[i64]) -> Vec<f64> {
        if one.rule == Rule::Tokens {
            return ids.iter().map(|id| *id as f64).collect();
        }
        let (past, total) = (sizes.of(Axis::Past), sizes.of(Axis::Total));
        let (count, columns) = (shape.iter().product::<usize>(), shape.last().map_or(1, |size| (*size).max(1)));
        let flag = |holds: bool| f64::from(u8::from(holds));
        let number = number(one, sizes);
        // The last token is in the last column of a window, and of a causal mask that counts from the right.
        let from_right = one.from_right || one.rule == Rule::WindowMask;
        let oldest = if from_right { columns as i64 - total as i64 } else { 0 };
        let queries = shape.iter().rev().nth(1).map_or(1, |size| (*size).max(1));
        let first_query = match one.dims.iter().rev().nth(1) {
            Some(Dim::Axis(Axis::Total)) => 0,
            _ => past,
        };
        let mask: Option<Vec<i64>> = self.source_mask.as_ref().map(|rows| rows.concat());
        let mask = mask.filter(|mask| mask.len() == count); // else the encoder shortens what it reads
        let mut values = Vec::with_capacity(count);
        for row in 0..count / columns {
            let padding = self.padding_of(one, shape, row);
            let shown =
                |column: usize, end: usize| (oldest + padding as i64..oldest + end as i64).contains(&(column as i64));
            values.extend((0..columns).map(|column| match one.rule {
                Rule::TokenAndPosition if column == 0 => ids[row] as f64,
                Rule::TokenAndPosition => past as f64,
                Rule::Rows => (row * columns + column) as f64,
                Rule::Positions => (past + column).saturating_sub(padding) as f64,
                Rule::AttentionMask | Rule::WindowMask => flag(shown(column, total)),
                Rule::PaddingMask => flag(!shown(column, total)),
                Rule::CausalMask if shown(column, first_query + row % queries + 1) => one.shown,
                Rule::CausalMask => one.hidden,
                Rule::EncoderMask => mask.as_ref().map_or(1.0, |mask| mask[row * columns + column] as f64),
                _ => number,
            }));
        }
        values
    }

    /// How much padding the sequence has that a row of an input belongs to.
    fn padding_of(&self, one: &Input, shape: &[usize], row: usize) -> usize {
        let inner = shape.len().saturating_sub(1);
        if inner == 0 || one.rule == Rule::CausalMask {
            return 0;
        }
        let axis = one.dims.iter().position(|dim| *dim == Dim::Axis(Axis::Batch));
        let repeated: usize = axis.map_or(1, |axis| shape[inner.min(axis + 1)..inner].iter().product());
        self.padding.get(row / repeated.max(1) % self.batch).copied().unwrap_or(0)
    }
}

fn number(one: &Input, sizes: &Sizes) -> f64 {
    let [past, total, new] = [Axis::Past, Axis::Total, Axis::New].map(|axis| sizes.of(axis) as f64);
    match one.count {
        Count::Past => past,
        Count::Total => total,
        Count::Last => total - 1.0,
        Count::New => new,
        Count::LastNew => new - 1.0,
        Count::Batch => sizes.of(Axis::Batch) as f64,
        Count::Cached => past.min(1.0),
        Count::First => 1.0 - past.min(1.0),
        Count::EncoderInput => sizes.of(Axis::EncoderInput) as f64,
        Count::Constant | Count::Other => one.value,
    }
}
