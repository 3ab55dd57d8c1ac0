//! The decoder: a model, and the cache of one batch of sequences.

use std::path::Path;
use std::sync::Arc;

use ort::environment::Environment;
use ort::ep::ExecutionProviderDispatch;

use crate::contract::{Contract, Dim};
use crate::graphs::Graphs;
use crate::state::State;
use crate::tensors::{size, tensor};
use crate::{Logits, Result, Trace, refuse};

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
        let capacity = if contract.capacity_is_chosen { settings.capacity } else { contract.context_limit };
        let state = State { capacity, ..State::default() };
        Ok(Self { contract: Arc::new(contract), graphs, state })
    }

    pub fn contract(&self) -> &Contract {
        &self.contract
    }

    /// Tokens in the cache, padding counted.
    pub fn length(&self) -> usize {
        self.state.length
    }

    /// The most tokens that a sequence may have.
    pub fn limit(&self) -> usize {
        let chosen = if self.contract.capacity_is_chosen { self.state.capacity } else { usize::MAX };
        self.contract.longest.min(chosen)
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
        let pad = |row: &[i64]| [row, &vec![0; longest - row.len()]].concat();
        let ids = rows.iter().flat_map(|row| pad(row)).map(|id| id as f64).collect();
        let unequal = rows.iter().any(|row| row.len() != longest);
        let mask = unequal.then(|| rows.iter().map(|row| pad(&vec![1; row.len()])).collect());
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
        let rows = source.batch_axis.map_or(1, |axis| shape[axis]);
        let length = shape[source.length_axis];
        if mask.is_some() && !source.masked {
            return refuse("this model takes no mask of the source: the sources must have the same length");
        }
        if mask.as_ref().is_some_and(|mask| mask.len() != rows || mask.iter().any(|row| row.len() != length)) {
            return refuse(format!("the mask of this source has {rows} rows of {length}"));
        }
        let mut state = State { capacity: self.state.capacity, ..State::default() };
        state.encoded.insert("source".into(), tensor(source.dtype, shape, &values)?);
        (state.mask, state.source_mask) = (mask.clone(), mask);
        state.run(&mut self.graphs, &contract, &contract.calls.encode, &vec![Vec::new(); rows])?;
        state.encoded.extend(state.cache.drain());
        self.state = state;
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
        let source = self.contract.source.as_ref().and_then(|source| source.batch_axis);
        let sources = source.zip(self.state.encoded.get("source")).map(|(axis, value)| size(value, axis));
        for (wanted, what) in [(self.contract.batch, "the graph takes"), (sources, "the source is for")] {
            if let Some(wanted) = wanted.filter(|wanted| *wanted != batch) {
                return refuse(format!("{batch} prompts, but {what} {wanted}"));
            }
        }
        self.check_tokens(prompts, longest, &padding)?;
        let padded = prompts.iter().zip(&padding);
        let rows: Vec<_> = padded.map(|(row, padded)| [&vec![0; *padded], row.as_ref()].concat()).collect();
        self.state.begin(&self.contract, padding)?;
        let logits = self.advance(&rows);
        if logits.is_err() {
            self.state.clear();
        }
        logits
    }

    /// Continues each sequence with new tokens, the same number of each; returns their logits.
    pub fn step(&mut self, tokens: &[impl AsRef<[i64]>]) -> Result<Logits> {
        self.check_begun()?;
        let (batch, count) = (self.state.padding.len(), tokens.first().map_or(0, |row| row.as_ref().len()));
        if tokens.len() != batch || tokens.iter().any(|row| row.as_ref().len() != count) || count == 0 {
            return refuse(format!("a step takes new tokens of {batch} sequences, the same number of each"));
        }
        if count > 1 && !self.contract.chunks {
            return refuse("a step of this model takes one token of each sequence");
        }
        self.check_tokens(tokens, self.state.length + count, &self.state.padding)?;
        self.advance(&tokens.iter().map(AsRef::as_ref).collect::<Vec<_>>())
    }

    fn check_begun(&self) -> Result<()> {
        if self.state.length == 0 { refuse("begin with prefill()") } else { Ok(()) }
    }

    /// Refuses ids that are no tokens of the model, or stand for what is no text, and more of them than there may be.
    fn check_tokens(&self, rows: &[impl AsRef<[i64]>], total: usize, padding: &[usize]) -> Result<()> {
        let contract = &self.contract;
        for id in rows.iter().flat_map(AsRef::as_ref) {
            if !(0..contract.vocabulary).contains(id) {
                return refuse(format!("token ids are 0 to {}, not {id}", contract.vocabulary - 1));
            }
            if contract.placeholders.contains(id) {
                return refuse(format!("token {id} stands for an image or audio, which this program does not take"));
            }
        }
        let padded = padding.iter().any(|count| *count > 0); // which a ring has no place for
        match if padded { self.limit().min(contract.context_limit) } else { self.limit() } {
            most if total > most => refuse(format!("{total} tokens; a sequence has at most {most} here")),
            _ => Ok(()),
        }
    }

    /// Runs the calls on new tokens; the logits of the last one.
    fn advance(&mut self, tokens: &[impl AsRef<[i64]>]) -> Result<Logits> {
        let (contract, count) = (&self.contract, tokens[0].as_ref().len());
        // In a ring that is full, one token is written over the oldest.
        let alone = contract.one_token || self.state.length + count > contract.context_limit;
        let (size, mut logits) = (if alone { 1 } else { count }, None);
        for at in (0..count).step_by(size) {
            let part: Vec<_> = tokens.iter().map(|row| row.as_ref()[at..at + size].to_vec()).collect();
            let calls = if self.state.length == 0 { &contract.calls.prefill } else { &contract.calls.decode };
            logits = self.state.run(&mut self.graphs, contract, calls, &part)?;
            self.state.length += size;
        }
        logits.map_or_else(|| refuse("the last call returns no logits"), Ok)
    }

    /// Forgets the last tokens of every sequence. At least one must stay.
    pub fn rewind(&mut self, count: usize) -> Result<()> {
        // What a ring has written over is gone.
        if !self.contract.rewinds || self.state.length > self.contract.context_limit {
            return refuse("a part of this cache cannot go back");
        }
        let shortest = self.state.length.saturating_sub(self.state.padding.iter().copied().max().unwrap_or(0));
        if count >= shortest {
            return refuse(format!("cannot forget {count} of {shortest} tokens"));
        }
        self.state.cut(&self.contract.cut, self.state.length - count)
    }

    /// Makes row i of the batch a copy of what row `order[i]` was, as a beam search needs it.
    pub fn reorder(&mut self, order: &[usize]) -> Result<()> {
        self.check_begun()?;
        if !self.contract.reorders {
            return refuse("the sequences of this model cannot be reordered");
        }
        let rows = self.state.padding.len();
        if order.is_empty() || order.iter().any(|row| *row >= rows) {
            return refuse(format!("{order:?} are not rows of {rows}"));
        }
        self.state.reorder(&self.contract.rows, order)
    }
}
