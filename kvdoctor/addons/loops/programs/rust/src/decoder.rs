//! The decoder: a model, and the cache of one batch of sequences.

use std::path::Path;
use std::sync::Arc;

use ort::environment::Environment;
use ort::ep::ExecutionProviderDispatch;
use ort::value::DynTensor;

use crate::contract::{Axis, Call, Carry, Contract, Dim, Dtype, Rewinds, Rule, Slot};
use crate::graph::{Graphs, Prepared, Tensors};
use crate::inputs::State;
use crate::tensors::{Number, join, size, tensor, with_type, write, zeros};
use crate::{Error, Logits, Result, Trace};

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
    encode: Option<Prepared>,
    embed: Option<Prepared>,
    prefill: Prepared,
    decode: Prepared,
    state: State,
    /// Whether what the encoder made has been reordered.
    reordered: bool,
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
        let calls = &contract.calls;
        let before =
            |call: &Option<Call>| call.as_ref().map(|call| graphs.prepare(call, &contract, |_| None)).transpose();
        let (encode, embed) = (before(&calls.encode)?, before(&calls.embed)?);
        let prefill = graphs.prepare(&calls.prefill, &contract, |slot| match slot.by_encoder {
            true => None,
            false => slot.made.as_ref(),
        })?;
        let decode = graphs.prepare(&calls.decode, &contract, |slot| slot.present.as_ref())?;
        let capacity = if contract.capacity_is_chosen { Some(settings.capacity) } else { contract.context_limit };
        let state = State { capacity, ..State::default() };
        let contract = Arc::new(contract);
        Ok(Self { contract, graphs, encode, embed, prefill, decode, state, reordered: false })
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
        self.reordered = false;
    }

    /// Says what the sequences are about with ids, a row for each; shorter ones are padded on the right and masked.
    pub fn encode_ids(&mut self, sources: &[impl AsRef<[i64]>]) -> Result<()> {
        let longest = sources.iter().map(|row| row.as_ref().len()).max().unwrap_or(0);
        let unequal = sources.iter().any(|row| row.as_ref().len() != longest);
        if sources.iter().any(|row| row.as_ref().is_empty()) || longest == 0 {
            return Error::argument("a source needs at least one id");
        }
        if unequal && !self.takes_mask() {
            return Error::argument("this model takes no mask of the source: the sources must have the same length");
        }
        let (mut ids, mut mask) = (Vec::new(), Vec::new());
        for row in sources.iter().map(AsRef::as_ref) {
            if let Some(id) = row.iter().find(|id| **id < 0) {
                return Error::argument(format!("the ids of the source are 0 or more, not {id}"));
            }
            let padding = longest - row.len();
            ids.extend(row.iter().copied().chain(std::iter::repeat_n(0, padding)));
            mask.push(std::iter::repeat_n(1, row.len()).chain(std::iter::repeat_n(0, padding)).collect());
        }
        self.encode_elements(&ids, |id| *id as f64, &[sources.len(), longest], self.takes_mask().then_some(mask))
    }

    /// Says what the sequences are about with the elements of a tensor, as features or encoder states are.
    ///
    /// The mask has a row for each sequence, with 0 for padding on the right; without it all of the source is read.
    pub fn encode(&mut self, values: &[f32], shape: &[usize], mask: Option<&[Vec<i64>]>) -> Result<()> {
        if mask.is_some() && !self.takes_mask() {
            return Error::argument("this model takes no mask of the source");
        }
        self.encode_elements(values, |value| f64::from(*value), shape, mask.map(<[_]>::to_vec))
    }

    fn takes_mask(&self) -> bool {
        self.contract.calls.iter().flat_map(|call| &call.inputs).any(|one| one.rule == Rule::EncoderMask)
    }

    fn encode_elements<S>(
        &mut self,
        values: &[S],
        of: impl Fn(&S) -> f64,
        shape: &[usize],
        mask: Option<Vec<Vec<i64>>>,
    ) -> Result<()> {
        let contract = Arc::clone(&self.contract);
        let Some(source) = &contract.source else {
            return Error::argument("this model has no encoder");
        };
        let fixed = |(size, dim): (&usize, &Dim)| matches!(dim, Dim::Size(wanted) if wanted != size);
        if shape.len() != source.dims.len() || shape.contains(&0) || shape.iter().zip(&source.dims).any(fixed) {
            return Error::argument(format!("the source cannot have shape {shape:?}: it is {:?}", source.dims));
        }
        let axis = |axis: Axis| source.dims.iter().position(|dim| *dim == Dim::Axis(axis));
        let along = axis(Axis::EncoderInput).or(axis(Axis::Encoder)).unwrap_or(shape.len() - 1);
        let length = shape[along];
        if mask.as_ref().is_some_and(|mask| mask.iter().any(|row| row.len() != length)) {
            return Error::argument(format!("the mask of this source has {length} columns"));
        }
        let elements = values.iter().map(of);
        let value = with_type!(source.dtype, T => tensor::<T>(shape, elements.map(T::of).collect()))?;
        let mut state = State {
            capacity: self.state.capacity,
            batch: shape[axis(Axis::Batch).unwrap_or(0)],
            sources: axis(Axis::Batch).map(|axis| shape[axis]),
            source_length: length,
            source_mask: mask,
            ..State::default()
        };
        state.encoded.insert(source.name.clone(), value);
        if let (Some(call), Some(prepared)) = (&contract.calls.encode, &self.encode) {
            let nothing = Tensors::new();
            let feeds = state.feeds(&contract, (&call.inputs, prepared), &[], &nothing)?;
            let made = self.graphs.run(call, prepared, feeds)?;
            state.encoded = prepared.outputs.iter().cloned().zip(made).collect();
        }
        (self.state, self.reordered) = (state, false);
        Ok(())
    }

    /// Begins sequences with their prompts; returns their logits.
    ///
    /// Shorter prompts are padded on the left where the contract allows it. Where the runtime fails there are no
    /// sequences afterwards; what was encoded stays.
    pub fn prefill(&mut self, prompts: &[impl AsRef<[i64]>]) -> Result<Logits> {
        let contract = Arc::clone(&self.contract);
        if contract.source.is_some() && (self.state.encoded.is_empty() || self.reordered) {
            return Error::argument("begin with encode(), and again after reorder()");
        }
        let longest = prompts.iter().map(|prompt| prompt.as_ref().len()).max().unwrap_or(0);
        if prompts.iter().any(|prompt| prompt.as_ref().is_empty()) || longest == 0 {
            return Error::argument("a prompt needs at least one token");
        }
        let padding: Vec<usize> = prompts.iter().map(|prompt| longest - prompt.as_ref().len()).collect();
        if !contract.pads && padding.iter().any(|padded| *padded > 0) {
            return Error::argument("this model takes no padding: the prompts must have the same length");
        }
        for (wanted, what) in [(contract.batch, "the graph takes"), (self.state.sources, "the source is for")] {
            if wanted.is_some_and(|wanted| wanted != prompts.len()) {
                let wanted = wanted.unwrap_or_default();
                return Error::argument(format!("{} prompts, but {what} {wanted}", prompts.len()));
            }
        }
        let mut ids = Vec::with_capacity(prompts.len() * longest);
        for (prompt, padded) in prompts.iter().zip(&padding) {
            check_ids(prompt.as_ref(), &contract)?;
            ids.extend(std::iter::repeat_n(0, *padded).chain(prompt.as_ref().iter().copied()));
        }
        self.check_room(longest)?;
        let state = &mut self.state;
        (state.length, state.batch, state.padding) = (0, prompts.len(), padding);
        state.cache.clear(); // releases the values before others are made
        state.cache = contract.slots.iter().map(|slot| first_value(slot, state)).collect::<Result<_>>()?;
        let logits = self.advance_all(&ids);
        if logits.is_err() {
            self.state.length = 0;
            self.state.cache.clear();
        }
        logits
    }

    /// The calls on all tokens of the prompts: one, or one for each position.
    fn advance_all(&mut self, ids: &[i64]) -> Result<Logits> {
        let longest = ids.len() / self.state.batch;
        if !self.contract.one_token {
            return self.advance(ids);
        }
        for position in 0..longest - 1 {
            self.advance(&column(ids, position, longest))?;
        }
        self.advance(&column(ids, longest - 1, longest))
    }

    /// Continues each sequence with new tokens, the same number of each; returns their logits.
    pub fn step(&mut self, tokens: &[impl AsRef<[i64]>]) -> Result<Logits> {
        self.check_begun()?;
        let count = tokens.first().map_or(0, |row| row.as_ref().len());
        if tokens.len() != self.state.batch || tokens.iter().any(|row| row.as_ref().len() != count) || count == 0 {
            let batch = self.state.batch;
            return Error::argument(format!("a step takes new tokens of {batch} sequences, the same number of each"));
        }
        if count > 1 && (!self.contract.chunks || self.contract.one_token) {
            return Error::argument("a step of this model takes one token of each sequence");
        }
        let ids: Vec<i64> = tokens.iter().flat_map(AsRef::as_ref).copied().collect();
        check_ids(&ids, &self.contract)?;
        self.check_room(self.state.length + count)?;
        self.advance(&ids)
    }

    fn check_begun(&self) -> Result<()> {
        if self.state.length == 0 { Error::argument("begin with prefill()") } else { Ok(()) }
    }

    fn check_room(&self, total: usize) -> Result<()> {
        match self.limit() {
            Some(limit) if total > limit => {
                Error::argument(format!("{total} tokens; a sequence has at most {limit} here"))
            }
            _ => Ok(()),
        }
    }

    /// Runs one call on new tokens, and keeps what it returns of the cache.
    fn advance(&mut self, ids: &[i64]) -> Result<Logits> {
        let contract = Arc::clone(&self.contract);
        let first = self.state.length == 0;
        let (call, prepared) = match first {
            true => (&contract.calls.prefill, &self.prefill),
            false => (&contract.calls.decode, &self.decode),
        };
        let (mut embedded, nothing) = (Tensors::new(), Tensors::new());
        if let (Some(embed), Some(ready)) = (&contract.calls.embed, &self.embed)
            && call.inputs.iter().any(|one| one.rule == Rule::Embeddings)
        {
            let feeds = self.state.feeds(&contract, (&embed.inputs, ready), ids, &nothing)?;
            embedded = ready.outputs.iter().cloned().zip(self.graphs.run(embed, ready, feeds)?).collect();
        }
        let feeds = self.state.feeds(&contract, (&call.inputs, prepared), ids, &embedded)?;
        let mut made: Vec<_> = self.graphs.run(call, prepared, feeds)?.into_iter().map(Some).collect();
        let logits = made.get_mut(prepared.logits).and_then(Option::take);
        let logits = logits.ok_or_else(|| Error::Contract(format!("{} returns no logits", call.file)))?;
        let logits = Logits::new(logits, self.state.batch)?;
        let mut next = Vec::with_capacity(prepared.filled.len());
        for (slot, output) in &prepared.filled {
            if let Some(value) = made[*output].take() {
                let past = self.state.cache[*slot].as_mut();
                next.push((*slot, next_value(&contract.slots[*slot], past, value, self.state.length)?));
            }
        }
        for (slot, value) in next.into_iter().filter_map(|(slot, value)| Some((slot, value?))) {
            self.state.cache[slot] = Some(value); // releases the value before
        }
        self.state.length += ids.len() / self.state.batch;
        Ok(logits)
    }

    /// Forgets the last tokens of every sequence. At least one must stay.
    pub fn rewind(&mut self, count: usize) -> Result<()> {
        if !self.contract.rewinds {
            return Error::argument("a part of this cache cannot go back");
        }
        let shortest = self.state.length.saturating_sub(self.state.padding.iter().copied().max().unwrap_or(0));
        if count >= shortest {
            return Error::argument(format!("cannot forget {count} of {shortest} tokens"));
        }
        let length = self.state.length - count;
        self.replace(|slot, value| match slot.length_axis {
            Some(axis) if slot.rewinds == Rewinds::Cut => join(axis, &[(value, 0..length)]).map(Some),
            _ => Ok(None),
        })?;
        self.state.length = length;
        Ok(())
    }

    /// Makes row i of the batch a copy of what row `order[i]` was, as a beam search needs it.
    pub fn reorder(&mut self, order: &[usize]) -> Result<()> {
        self.check_begun()?;
        if !self.contract.reorders {
            return Error::argument("the sequences of this model cannot be reordered");
        }
        if order.is_empty() || order.iter().any(|row| *row >= self.state.batch) {
            return Error::argument(format!("{order:?} are not rows of {}", self.state.batch));
        }
        let taken = |value: &DynTensor, axis: usize, heads: usize| {
            let pieces = order.iter().map(|row| (value, row * heads..(row + 1) * heads));
            join(axis, &pieces.collect::<Vec<_>>())
        };
        let contract = Arc::clone(&self.contract);
        let mut encoded = Tensors::new();
        for (name, value) in &self.state.encoded {
            let slot = contract.slots.iter().find(|slot| slot.by_encoder && slot.made.as_ref() == Some(name));
            let axis = slot.map_or(Some(0), |slot| slot.batch_axis);
            if let Some(axis) = axis.filter(|axis| size(value, *axis) == self.state.batch) {
                encoded.insert(name.clone(), taken(value, axis, 1)?);
            }
        }
        self.replace(|slot, value| {
            let Some(axis) = slot.batch_axis else { return Ok(None) };
            let heads = if slot.dims[axis] == Dim::Axis(Axis::BatchHeads) { slot.heads } else { 1 };
            taken(value, axis, heads).map(Some)
        })?;
        let state = &mut self.state;
        state.encoded.extend(encoded);
        if let Some(mask) = &mut state.source_mask {
            *mask = order.iter().map(|row| mask[*row].clone()).collect();
        }
        state.padding = order.iter().map(|row| state.padding[*row]).collect();
        (state.batch, self.reordered) = (order.len(), true);
        Ok(())
    }

    /// Replaces the values of the cache by what a function makes of them, all or none.
    fn replace(&mut self, make: impl Fn(&Slot, &DynTensor) -> Result<Option<DynTensor>>) -> Result<()> {
        let mut made = Vec::with_capacity(self.state.cache.len());
        for (slot, value) in self.contract.slots.iter().zip(&self.state.cache) {
            made.push(value.as_ref().map(|value| make(slot, value)).transpose()?.flatten());
        }
        for (value, made) in self.state.cache.iter_mut().zip(made) {
            if made.is_some() {
                *value = made;
            }
        }
        Ok(())
    }
}

/// What the first call is fed of a slot: zeros, or `None` where the encoder or the call itself makes it.
fn first_value(slot: &Slot, state: &State) -> Result<Option<DynTensor>> {
    let shape = state.first_sizes(slot).shape(&slot.dims);
    slot.fed_zeros.then(|| zeros(slot.dtype, &shape)).transpose()
}

/// The next value of a slot: the output itself, or what is made of it; `None` where it is written into the past.
fn next_value(
    slot: &Slot,
    past: Option<&mut DynTensor>,
    present: DynTensor,
    length: usize,
) -> Result<Option<DynTensor>> {
    let (Some(axis), Some(past), true) = (slot.length_axis, past, slot.present.is_some()) else {
        return Ok(Some(present));
    };
    let (held, count) = (size(past, axis), size(&present, axis));
    match slot.carry {
        Carry::Append => join(axis, &[(past, 0..held), (&present, 0..count)]).map(Some),
        Carry::Shift => join(axis, &[(past, count.min(held)..held), (&present, 0..count)]).map(Some),
        Carry::DropOldest => join(axis, &[(&present, 1..count)]).map(Some),
        Carry::Write => write(past, axis, length, &present).map(|()| None),
        _ => Ok(Some(present)),
    }
}

/// Refuses ids that are no tokens of the model, or stand for what is no text.
fn check_ids(ids: &[i64], contract: &Contract) -> Result<()> {
    let known = |id: i64| id >= 0 && contract.vocabulary.is_none_or(|size| id < size);
    if let Some(id) = ids.iter().find(|id| !known(**id)) {
        let most = contract.vocabulary.map_or_else(String::new, |size| format!(" to {}", size - 1));
        return Error::argument(format!("token ids are 0{most}, not {id}"));
    }
    match ids.iter().find(|id| contract.placeholders.contains(id)) {
        Some(id) => {
            Error::argument(format!("token {id} stands for an image or audio, which this program does not take"))
        }
        None => Ok(()),
    }
}

fn column(ids: &[i64], position: usize, length: usize) -> Vec<i64> {
    ids.iter().skip(position).step_by(length).copied().collect()
}
