//! The decoder: a model, and the cache of one batch of sequences.

use std::iter::repeat_n;
use std::path::Path;
use std::sync::Arc;

use ort::environment::Environment;
use ort::ep::ExecutionProviderDispatch;
use ort::value::DynTensor;

use crate::contract::{Axis, Carry, Contract, Dim, Rule};
use crate::graphs::{Graphs, Tensors};
use crate::inputs::State;
use crate::tensors::{join, size, tensor, write, zeros};
use crate::{Error, Logits, Result, Trace, refuse};

/// How a model is opened.
#[derive(Clone)]
pub struct Settings {
    /// The execution providers of the sessions; the CPU is always there.
    pub providers: Vec<ExecutionProviderDispatch>,
    /// Threads of each session; `None` leaves it to the runtime.
    pub threads: Option<usize>,
    /// Room of the cache in tokens, where the contract leaves it to the caller.
    pub capacity: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { providers: Vec::new(), threads: None, capacity: 512 }
    }
}

/// A model, and the cache of one batch of sequences.
///
/// The cache goes from step to step as the runtime made it. Only the parts that the contract lets the loop put
/// together, and those that `rewind` and `reorder` change, are copied.
pub struct Decoder {
    contract: Arc<Contract>,
    graphs: Graphs,
    state: State,
    /// The number of sequences that the source is for, where it has an axis for them.
    sources: Option<usize>,
}

impl Decoder {
    /// Opens the files in a folder. There is one environment in a process, made by `ort::init().build()`, for all
    /// decoders and whatever else it runs.
    pub fn open(
        environment: &Environment,
        folder: impl AsRef<Path>,
        contract: Contract,
        settings: Settings,
    ) -> Result<Self> {
        let graphs = Graphs::open(environment, folder.as_ref(), &contract, &settings)?;
        let capacity = if contract.capacity_is_chosen { Some(settings.capacity) } else { contract.context_limit };
        let state = State { capacity, ..State::default() };
        Ok(Self { contract: Arc::new(contract), graphs, state, sources: None })
    }

    pub fn contract(&self) -> &Contract {
        &self.contract
    }

    /// Tokens in the cache, padding counted.
    pub fn length(&self) -> usize {
        self.state.length
    }

    /// The most tokens that a sequence may have.
    pub fn limit(&self) -> Option<usize> {
        [self.contract.context_limit, self.state.capacity].into_iter().flatten().min()
    }

    /// Writes down the calls from now on.
    pub fn set_trace(&mut self, trace: Option<Trace>) {
        self.graphs.trace = trace;
    }

    /// Begins anew: no sequences, and nothing encoded.
    pub fn reset(&mut self) {
        self.state = State { capacity: self.state.capacity, ..State::default() };
    }

    /// Says what the sequences are about with ids, a row for each; shorter ones are padded on the right and masked.
    pub fn encode_ids(&mut self, sources: &[impl AsRef<[i64]>]) -> Result<()> {
        let rows: Vec<&[i64]> = sources.iter().map(AsRef::as_ref).collect();
        let longest = rows.iter().map(|row| row.len()).max().unwrap_or(0);
        if longest == 0 || rows.iter().any(|row| row.is_empty()) {
            return refuse("a source needs at least one id");
        }
        if let Some(id) = rows.iter().copied().flatten().find(|id| **id < 0) {
            return refuse(format!("the ids of the source are 0 or more, not {id}"));
        }
        let unequal = rows.iter().any(|row| row.len() != longest);
        let pad = |row: &[i64], one: &dyn Fn(i64) -> i64| -> Vec<i64> {
            row.iter().map(|id| one(*id)).chain(repeat_n(0, longest - row.len())).collect()
        };
        let ids = rows.iter().flat_map(|row| pad(row, &|id| id)).map(|id| id as f64).collect();
        let mask = unequal.then(|| rows.iter().map(|row| pad(row, &|_| 1)).collect());
        self.encode_values(ids, &[rows.len(), longest], mask)
    }

    /// Says what the sequences are about with the elements of a tensor, as features or encoder states are.
    ///
    /// The mask has a row for each sequence, with 0 for padding on the right; without it all of the source is read.
    pub fn encode(&mut self, values: &[f32], shape: &[usize], mask: Option<&[Vec<i64>]>) -> Result<()> {
        self.encode_values(values.iter().copied().map(f64::from).collect(), shape, mask.map(<[_]>::to_vec))
    }

    fn encode_values(&mut self, values: Vec<f64>, shape: &[usize], mask: Option<Vec<Vec<i64>>>) -> Result<()> {
        let contract = Arc::clone(&self.contract);
        let Some(source) = &contract.source else {
            return refuse("this model has no encoder");
        };
        let fixed = |(size, dim): (&usize, &Dim)| matches!(dim, Dim::Size(wanted) if wanted != size);
        if shape.len() != source.dims.len() || shape.contains(&0) || shape.iter().zip(&source.dims).any(fixed) {
            return refuse(format!("the source cannot have shape {shape:?}: it is {:?}", source.dims));
        }
        let axis = |axis: Axis| source.dims.iter().position(|dim| *dim == Dim::Axis(axis));
        let length = shape[axis(Axis::EncoderInput).or(axis(Axis::Encoder)).unwrap_or(shape.len() - 1)];
        if mask.is_some() && !contract.calls.follow(Rule::EncoderMask) {
            return refuse("this model takes no mask of the source: the sources must have the same length");
        }
        let rows = shape[source.batch_axis.unwrap_or(0)];
        if mask.as_ref().is_some_and(|mask| mask.len() != rows || mask.iter().any(|row| row.len() != length)) {
            return refuse(format!("the mask of this source has {rows} rows of {length}"));
        }
        let value = tensor(source.dtype, shape, &values)?;
        let mut state = State {
            capacity: self.state.capacity,
            encoded: Tensors::from([(source.name.clone(), value)]),
            rows: (0..rows).collect(),
            source_length: length,
            source_mask: mask,
            ..State::default()
        };
        if let Some(call) = &contract.calls.encode {
            let nothing = Tensors::new();
            state.encoded = self.graphs.run(call, state.feeds(call, &[], &nothing)?)?;
            for fill in &call.fills {
                if let Some(value) = state.encoded.remove(&fill.output) {
                    state.encoded.insert(contract.slots[fill.slot].past.clone(), value);
                }
            }
        }
        (self.state, self.sources) = (state, source.batch_axis.map(|axis| shape[axis]));
        Ok(())
    }

    /// Begins sequences with their prompts; returns their logits.
    ///
    /// Shorter prompts are padded on the left where the contract allows it. Where the runtime fails there are no
    /// sequences afterwards; what was encoded stays.
    pub fn prefill(&mut self, prompts: &[impl AsRef<[i64]>]) -> Result<Logits> {
        let (batch, longest) = (prompts.len(), prompts.iter().map(|row| row.as_ref().len()).max().unwrap_or(0));
        let padding: Vec<usize> = prompts.iter().map(|row| longest - row.as_ref().len()).collect();
        if self.contract.source.is_some() && self.state.encoded.is_empty() {
            return refuse("begin with encode()");
        }
        if longest == 0 || padding.contains(&longest) {
            return refuse("a prompt needs at least one token");
        }
        if !self.contract.pads && padding.iter().any(|padded| *padded > 0) {
            return refuse("this model takes no padding: the prompts must have the same length");
        }
        for (wanted, what) in [(self.contract.batch, "the graph takes"), (self.sources, "the source is for")] {
            if let Some(wanted) = wanted.filter(|wanted| *wanted != batch) {
                return refuse(format!("{batch} prompts, but {what} {wanted}"));
            }
        }
        self.check_tokens(prompts, longest)?;
        let padded = prompts.iter().zip(&padding);
        let ids: Vec<i64> = padded.flat_map(|(row, padded)| [&vec![0; *padded], row.as_ref()].concat()).collect();
        let state = &mut self.state;
        (state.length, state.rows, state.padding) = (0, (0..batch).collect(), padding);
        state.cache.clear(); // releases the values before others are made
        for slot in &self.contract.slots {
            if let Some(dims) = &slot.zeros {
                let value = zeros(slot.dtype, &state.sizes(0, 0, slot.heads).shape(dims))?;
                state.cache.insert(slot.past.clone(), value);
            }
        }
        let calls = if self.contract.one_token { longest } else { 1 };
        let mut logits = refuse("there are no tokens");
        for first in 0..calls {
            let new: Vec<i64> = match calls {
                1 => ids.clone(),
                _ => ids.iter().skip(first).step_by(longest).copied().collect(),
            };
            logits = self.advance(&new);
            if logits.is_err() {
                self.state.length = 0;
                self.state.cache.clear();
                break;
            }
        }
        logits
    }

    /// Continues each sequence with new tokens, the same number of each; returns their logits.
    pub fn step(&mut self, tokens: &[impl AsRef<[i64]>]) -> Result<Logits> {
        self.check_begun()?;
        let (batch, count) = (self.state.rows.len(), tokens.first().map_or(0, |row| row.as_ref().len()));
        if tokens.len() != batch || tokens.iter().any(|row| row.as_ref().len() != count) || count == 0 {
            return refuse(format!("a step takes new tokens of {batch} sequences, the same number of each"));
        }
        if count > 1 && (!self.contract.chunks || self.contract.one_token) {
            return refuse("a step of this model takes one token of each sequence");
        }
        self.check_tokens(tokens, self.state.length + count)?;
        let ids: Vec<i64> = tokens.iter().flat_map(AsRef::as_ref).copied().collect();
        self.advance(&ids)
    }

    fn check_begun(&self) -> Result<()> {
        if self.state.length == 0 { refuse("begin with prefill()") } else { Ok(()) }
    }

    /// Refuses ids that are no tokens of the model, or stand for what is no text, and more of them than there may be.
    fn check_tokens(&self, rows: &[impl AsRef<[i64]>], total: usize) -> Result<()> {
        let contract = &self.contract;
        for id in rows.iter().flat_map(AsRef::as_ref) {
            if *id < 0 || contract.vocabulary.is_some_and(|size| *id >= size) {
                let most = contract.vocabulary.map_or_else(String::new, |size| format!(" to {}", size - 1));
                return refuse(format!("token ids are 0{most}, not {id}"));
            }
            if contract.placeholders.contains(id) {
                return refuse(format!("token {id} stands for an image or audio, which this program does not take"));
            }
        }
        match self.limit().filter(|limit| total > *limit) {
            Some(limit) => refuse(format!("{total} tokens; a sequence has at most {limit} here")),
            None => Ok(()),
        }
    }

    /// Runs one call on new tokens, and keeps what it returns of the cache.
    fn advance(&mut self, ids: &[i64]) -> Result<Logits> {
        let contract = Arc::clone(&self.contract);
        let (state, nothing) = (&mut self.state, Tensors::new());
        let call = if state.length == 0 { &contract.calls.prefill } else { &contract.calls.decode };
        let embed = contract.calls.embed.as_ref();
        let embed = embed.filter(|_| call.inputs.iter().any(|input| input.rule == Rule::Embeddings));
        let embedded = match embed {
            Some(embed) => self.graphs.run(embed, state.feeds(embed, ids, &nothing)?)?,
            None => Tensors::new(),
        };
        let mut made = self.graphs.run(call, state.feeds(call, ids, &embedded)?)?;
        let logits = call.logits.as_ref().and_then(|name| made.remove(name));
        let logits = logits.ok_or_else(|| Error::Contract(format!("{} returns no logits", call.file)))?;
        let logits = Logits::new(logits, state.rows.len())?;
        let mut next = Vec::with_capacity(call.fills.len());
        for fill in &call.fills {
            let slot = &contract.slots[fill.slot];
            if let Some(present) = made.remove(&fill.output) {
                let past = state.cache.get_mut(&slot.past);
                let value = next_value(fill.carry, slot.length_axis.zip(past), present, state.length)?;
                next.extend(value.map(|value| (slot.past.clone(), value)));
            }
        }
        state.cache.extend(next); // releases the values before
        state.length += ids.len() / state.rows.len();
        Ok(logits)
    }

    /// Forgets the last tokens of every sequence. At least one must stay.
    pub fn rewind(&mut self, count: usize) -> Result<()> {
        if !self.contract.rewinds {
            return refuse("a part of this cache cannot go back");
        }
        let shortest = self.state.length.saturating_sub(self.state.padding.iter().copied().max().unwrap_or(0));
        if count >= shortest {
            return refuse(format!("cannot forget {count} of {shortest} tokens"));
        }
        let length = self.state.length - count;
        let mut cut = Tensors::new();
        for slot in self.contract.slots.iter().filter(|slot| slot.rewinds == "cut") {
            if let (Some(value), Some(axis)) = (self.state.value(&slot.past), slot.length_axis) {
                cut.insert(slot.past.clone(), join(axis, &[(value, 0..length)])?);
            }
        }
        self.state.cache.extend(cut);
        self.state.length = length;
        Ok(())
    }

    /// Makes row i of the batch a copy of what row `order[i]` was, as a beam search needs it.
    pub fn reorder(&mut self, order: &[usize]) -> Result<()> {
        self.check_begun()?;
        if !self.contract.reorders {
            return refuse("the sequences of this model cannot be reordered");
        }
        let (contract, state) = (&self.contract, &mut self.state);
        if order.is_empty() || order.iter().any(|row| *row >= state.rows.len()) {
            return refuse(format!("{order:?} are not rows of {}", state.rows.len()));
        }
        let mut chosen = Tensors::new();
        let encoded = state.encoded.iter().filter(|(name, _)| !state.cache.contains_key(*name));
        for (name, value) in encoded.chain(&state.cache) {
            let slot = contract.slots.iter().find(|slot| slot.past == *name);
            let source = contract.source.as_ref().filter(|source| source.name == *name);
            let axis = slot.map_or(source.map_or(Some(0), |source| source.batch_axis), |slot| slot.batch_axis);
            let heads = slot.map_or(1, |slot| slot.heads);
            if let Some(axis) = axis {
                let pieces = order.iter().map(|row| (value, row * heads..(row + 1) * heads));
                chosen.insert(name.clone(), join(axis, &pieces.collect::<Vec<_>>())?);
            }
        }
        state.cache.extend(chosen);
        state.rows = order.iter().map(|row| state.rows[*row]).collect();
        state.padding = order.iter().map(|row| state.padding[*row]).collect();
        Ok(())
    }
}

/// The next value of a slot: the output itself, or what is made of it; `None` where it is written into the past.
fn next_value(
    carry: Carry,
    past: Option<(usize, &mut DynTensor)>,
    present: DynTensor,
    length: usize,
) -> Result<Option<DynTensor>> {
    let Some((axis, past)) = past else {
        return Ok(Some(present));
    };
    let (held, count) = (size(past, axis), size(&present, axis));
    match carry {
        Carry::Append => join(axis, &[(past, 0..held), (&present, 0..count)]).map(Some),
        Carry::Shift => join(axis, &[(past, count.min(held)..held), (&present, 0..count)]).map(Some),
        Carry::DropOldest => join(axis, &[(&present, 1..count)]).map(Some),
        Carry::Write => write(past, axis, length, &present).map(|()| None),
        _ => Ok(Some(present)),
    }
}
