//! What a call is fed: each rule of the contract.

use ort::value::DynTensor;

use crate::contract::{Axis, Contract, Count, Dim, Dtype, Input, Rule, Slot};
use crate::graph::{Feeds, Prepared, Tensors};
use crate::tensors::{Number, size, tensor, with_type};
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
    /// The values to feed next, by slot; where there is none it is what the encoder made.
    pub cache: Vec<Option<DynTensor>>,
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

/// The size of each axis in one call.
pub struct Sizes([usize; 9]);

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
    /// The sizes of a call on new tokens of all sequences.
    pub fn sizes(&self, contract: &Contract, ids: usize) -> Sizes {
        let (batch, past, capacity) = (self.batch, self.length, self.capacity.unwrap_or(1));
        let new = ids.checked_div(batch).unwrap_or(0);
        let encoder = self.encoder_length(contract);
        Sizes([batch, batch, new, past, past + new, capacity, encoder, self.source_length, 1])
    }

    /// The sizes of a slot before the first call.
    pub fn first_sizes(&self, slot: &Slot) -> Sizes {
        let (batch, first) = (self.batch, slot.first_length);
        Sizes([batch, batch * slot.heads, 1, first, 1, self.capacity.unwrap_or(1), first, 1, 1])
    }

    /// The name under which `encoded` has the states of the encoder.
    pub fn states<'a>(&self, contract: &'a Contract) -> Option<&'a String> {
        match &contract.calls.encode {
            Some(encode) => encode.states.as_ref(),
            None => contract.source.as_ref().map(|source| &source.name),
        }
    }

    /// The value of a slot.
    pub fn held(&self, contract: &Contract, slot: usize) -> Option<&DynTensor> {
        let made = || contract.slots[slot].made.as_ref().and_then(|made| self.encoded.get(made));
        self.cache.get(slot).and_then(Option::as_ref).or_else(made)
    }

    /// The number of encoder states: of those that are there, else of a slot that counts them, else of the source.
    fn encoder_length(&self, contract: &Contract) -> usize {
        let made = contract.calls.encode.as_ref().is_some_and(|encode| encode.states.is_some());
        let given = contract.source.as_ref().is_some_and(|source| source.rule == Rule::EncoderStates);
        if let Some(states) = self.states(contract).and_then(|name| self.encoded.get(name))
            && (made || given)
        {
            return size(states, 1);
        }
        let counts = contract.slots.iter().position(|slot| slot.counts_states);
        if let Some(slot) = counts
            && let Some(axis) = contract.slots[slot].length_axis
            && (self.length > 0 || contract.slots[slot].by_encoder)
            && let Some(value) = self.held(contract, slot)
        {
            return size(value, axis);
        }
        self.source_length
    }

    /// All inputs of a call; `embedded` is what the embedding graph made of the new tokens.
    pub fn feeds<'a>(
        &'a self,
        contract: &'a Contract,
        (inputs, prepared): (&'a [Input], &Prepared),
        ids: &[i64],
        embedded: &'a Tensors,
    ) -> Result<Feeds<'a>> {
        let sizes = self.sizes(contract, ids.len());
        let mut feeds = Feeds::with_capacity(inputs.len() + prepared.pasts.len());
        for one in inputs {
            let there = match one.rule {
                Rule::Embeddings => one.made.as_ref().and_then(|made| embedded.get(made)),
                Rule::EncoderStates => self.states(contract).and_then(|name| self.encoded.get(name)),
                Rule::EncoderInput => self.encoded.get(&one.name),
                _ => {
                    let made = with_type!(one.dtype, T => self.made::<T>(one, &sizes, ids))?;
                    feeds.push((&one.name, made.into()));
                    continue;
                }
            };
            feeds.push((&one.name, there.ok_or_else(|| missing(&one.name))?.into()));
        }
        for slot in &prepared.pasts {
            let past = &contract.slots[*slot].past;
            feeds.push((past, self.held(contract, *slot).ok_or_else(|| missing(past))?.into()));
        }
        Ok(feeds)
    }

    /// The tensor of an input that is made for a call.
    fn made<T: Number>(&self, one: &Input, sizes: &Sizes, ids: &[i64]) -> Result<DynTensor> {
        let shape = sizes.shape(&one.dims);
        let count = shape.iter().product();
        let columns = shape.last().copied().unwrap_or(1);
        let values = match one.rule {
            Rule::Tokens => ids.iter().map(|id| T::of(*id as f64)).collect(),
            Rule::TokenAndPosition => {
                ids.iter().flat_map(|id| [T::of(*id as f64), T::of(sizes.of(Axis::Past) as f64)]).collect()
            }
            Rule::AttentionMask | Rule::PaddingMask => self.by_row(one, &shape, |row: &mut [T], padding| {
                let (shown, hidden) = if one.rule == Rule::AttentionMask { (1.0, 0.0) } else { (0.0, 1.0) };
                let end = sizes.of(Axis::Total).min(columns);
                row.fill(T::of(hidden));
                row[padding.min(end)..end].fill(T::of(shown));
            }),
            Rule::WindowMask => self.by_row(one, &shape, |row: &mut [T], padding| {
                let begin = (columns + padding).saturating_sub(sizes.of(Axis::Total)).min(columns);
                row[begin..].fill(T::of(1.0)); // the last token is in the last column
            }),
            Rule::Rows => (0..count).map(|row| T::of(row as f64)).collect(),
            Rule::Positions => self.by_row(one, &shape, |row: &mut [T], padding| {
                for (column, value) in row.iter_mut().enumerate() {
                    *value = T::of((sizes.of(Axis::Past) + column).saturating_sub(padding) as f64);
                }
            }),
            Rule::CausalMask => causal_mask(one, &shape, sizes),
            Rule::EncoderMask => match &self.source_mask {
                Some(mask) if mask.iter().map(Vec::len).sum::<usize>() == count => {
                    mask.iter().flatten().map(|shown| T::of(*shown as f64)).collect()
                }
                _ => vec![T::of(1.0); count], // where the encoder shortens what it reads, all states count
            },
            _ => vec![T::of(number(one, sizes)); count],
        };
        tensor(&shape, values)
    }

    /// The elements of a tensor, from a function that fills a row with the padding of its sequence.
    fn by_row<T: Number>(&self, one: &Input, shape: &[usize], mut fill: impl FnMut(&mut [T], usize)) -> Vec<T> {
        let mut values = vec![T::of(0.0); shape.iter().product()];
        let inner = shape.len().saturating_sub(1);
        let axis = one.dims.iter().position(|dim| *dim == Dim::Axis(Axis::Batch));
        let repeated: usize = axis.map_or(1, |axis| shape[inner.min(axis + 1)..inner].iter().product());
        for (row, values) in values.chunks_mut(shape.last().copied().unwrap_or(1).max(1)).enumerate() {
            let sequence = if inner == 0 { None } else { self.padding.get(row / repeated.max(1) % self.batch) };
            fill(values, sequence.copied().unwrap_or(0));
        }
        values
    }
}

fn missing(name: &str) -> Error {
    Error::Argument(format!("there is nothing to feed to {name:?}: begin with encode()"))
}

/// `shown` where a query may look: at its own position and at those before it; else `hidden`.
fn causal_mask<T: Number>(one: &Input, shape: &[usize], sizes: &Sizes) -> Vec<T> {
    let (queries, columns) = (shape[shape.len() - 2], shape[shape.len() - 1]);
    let first = if one.dims[one.dims.len() - 2] == Dim::Axis(Axis::Total) { 0 } else { sizes.of(Axis::Past) };
    // Where the columns count from the right, the newest token is in the last one.
    let oldest = if one.from_right { columns as i64 - sizes.of(Axis::Total) as i64 } else { 0 };
    let place = |column: i64| column.clamp(0, columns as i64) as usize;
    let mut values = vec![T::of(one.hidden); shape.iter().product()];
    for (row, values) in values.chunks_mut(columns.max(1)).enumerate() {
        let end = oldest + (first + row % queries + 1) as i64;
        values[place(oldest)..place(end)].fill(T::of(one.shown));
    }
    values
}

fn number(one: &Input, sizes: &Sizes) -> f64 {
    let [past, total, new] = [Axis::Past, Axis::Total, Axis::New].map(|axis| sizes.of(axis) as f64);
    match one.count {
        Count::Constant => one.value,
        Count::Past => past,
        Count::Total => total,
        Count::Last => total - 1.0,
        Count::New => new,
        Count::LastNew => new - 1.0,
        Count::Batch => sizes.of(Axis::Batch) as f64,
        Count::Cached => past.min(1.0),
        Count::First => 1.0 - past.min(1.0),
        Count::EncoderInput => sizes.of(Axis::EncoderInput) as f64,
    }
}
