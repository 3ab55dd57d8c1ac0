//! The decode loop of llama-gqa (layout optimum-decoder-only), written by kvdoctor 0.1.0.
//!
//! ```no_run
//! # fn main() -> decode_loop::Result<()> {
//! let mut decoder = decode_loop::Decoder::open("path/to/the/model")?;
//! let tokens = decoder.generate(&[[5, 6, 7]], 20, &[], decode_loop::likeliest, |_, _| ())?;
//! # Ok(())
//! # }
//! ```
//!
//! All names, types and sizes are those of the cache contract of this model; README.md says it in
//! words.

mod providers;
pub mod trace;

use std::collections::HashMap;
use std::error::Error;
use std::ops::Range;
use std::path::Path;
#[cfg(not(feature = "ort-rc10"))]
use std::sync::LazyLock;

use ort::memory::Allocator;
#[cfg(feature = "ort-rc10")]
use ort::session::run_options::OutputSelector;
use ort::session::{RunOptions, Session, SessionInputValue};
use ort::value::{DynTensor, DynTensorValueType, Tensor};
#[cfg(not(feature = "ort-rc10"))]
use ort::{environment::Environment, session::OutputSelector};

use providers::Provider;
use trace::Trace;

/// What the methods return; errors of the runtime keep their text.
pub type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const DECODER: &str = "model.onnx";
const LOGITS: &str = "logits";
/// The most tokens that a sequence may have.
pub const MOST_TOKENS: usize = 64;
/// Token ids are smaller than this.
pub const VOCABULARY: i64 = 128;

/// The size of an axis of the cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Axis {
    Size(usize),
    Batch,
    Past,
}
use Axis::*;

/// One tensor of the cache.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// The input that it is fed to.
    pub past: &'static str,
    /// The output that first fills it, of the first call.
    pub made: Option<&'static str>,
    /// The output of each later call that carries it on; `None` where the first value is kept.
    pub present: Option<&'static str>,
    pub shape: &'static [Axis],
    /// The axis of the sequences.
    pub batch_axis: Option<usize>,
    /// The axis of the tokens.
    pub length_axis: Option<usize>,
}

pub static CACHE: [Slot; 4] = [
    Slot {
        past: "past_key_values.0.key",
        made: Some("present.0.key"),
        present: Some("present.0.key"),
        shape: &[Batch, Size(2), Past, Size(8)],
        batch_axis: Some(0),
        length_axis: Some(2),
    },
    Slot {
        past: "past_key_values.0.value",
        made: Some("present.0.value"),
        present: Some("present.0.value"),
        shape: &[Batch, Size(2), Past, Size(8)],
        batch_axis: Some(0),
        length_axis: Some(2),
    },
    Slot {
        past: "past_key_values.1.key",
        made: Some("present.1.key"),
        present: Some("present.1.key"),
        shape: &[Batch, Size(2), Past, Size(8)],
        batch_axis: Some(0),
        length_axis: Some(2),
    },
    Slot {
        past: "past_key_values.1.value",
        made: Some("present.1.value"),
        present: Some("present.1.value"),
        shape: &[Batch, Size(2), Past, Size(8)],
        batch_axis: Some(0),
        length_axis: Some(2),
    },
];

const OUTPUTS: &[&str] =
    &["logits", "present.0.key", "present.0.value", "present.1.key", "present.1.value"];

/// Inputs of a call by name. Those of the cache are views: the values stay with the decoder.
type Feeds<'a> = Vec<(&'static str, SessionInputValue<'a>)>;

/// Values of the runtime by name.
type Tensors = HashMap<&'static str, DynTensor>;

/// How the model is opened.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The execution provider, by its name in the runtime or by that of its feature in Cargo.toml.
    pub provider: String,
}

impl Default for Settings {
    fn default() -> Self {
        Self { provider: "cpu".into() }
    }
}

/// The model, and the cache of one batch of sequences.
///
/// The cache goes from step to step as the runtime made it, without a copy. A value is released as
/// soon as the next step has replaced it.
pub struct Decoder {
    decoder: Graph,
    trace: Option<Trace>,
    length: usize,
    batch: usize,
    padding: Vec<usize>,
    /// The values to feed next.
    cache: Tensors,
}

impl Decoder {
    /// Opens the files in a folder.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(folder, &Settings::default())
    }

    /// Opens the files in a folder with settings.
    pub fn open_with(folder: impl AsRef<Path>, settings: &Settings) -> Result<Self> {
        let provider = Provider::of(&settings.provider)?;
        let folder = folder.as_ref();
        Ok(Self {
            decoder: Graph::open(folder, DECODER, provider)?,
            trace: Trace::from_environment()?,
            length: 0,
            batch: 0,
            padding: Vec::new(),
            cache: Tensors::new(),
        })
    }

    /// Tokens in the cache, padding counted.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The most tokens that a sequence may have.
    pub fn limit(&self) -> usize {
        MOST_TOKENS
    }

    /// Writes down the calls from now on; at first they go to the file that `KVDOCTOR_TRACE` names.
    pub fn set_trace(&mut self, trace: Option<Trace>) {
        self.trace = trace;
    }

    /// Begins anew: no sequences.
    pub fn reset(&mut self) {
        self.length = 0;
        self.cache.clear();
    }

    /// Begins sequences with their prompts; returns the last logits of each.
    ///
    /// Shorter prompts are padded on the left: the mask hides the padding, and positions do not
    /// count it.
    pub fn prefill(&mut self, prompts: &[impl AsRef<[i64]>]) -> Result<Vec<Vec<f32>>> {
        if prompts.iter().any(|prompt| prompt.as_ref().is_empty()) {
            return Err("a prompt needs at least one token".into());
        }
        let longest = prompts.iter().map(|prompt| prompt.as_ref().len()).max();
        let longest = longest.ok_or("there is no prompt")?;
        let mut ids = Vec::new();
        for prompt in prompts {
            ids.resize(ids.len() + longest - prompt.as_ref().len(), 0);
            ids.extend_from_slice(prompt.as_ref());
        }
        check_ids(&ids)?;
        self.length = 0;
        self.batch = prompts.len();
        self.padding = prompts.iter().map(|prompt| longest - prompt.as_ref().len()).collect();
        self.cache.clear();
        self.advance(&ids)
    }

    /// Continues each sequence with its new tokens; returns logits as `prefill` does.
    pub fn step(&mut self, tokens: &[impl AsRef<[i64]>]) -> Result<Vec<Vec<f32>>> {
        if self.length == 0 {
            return Err("begin with prefill()".into());
        }
        if tokens.len() != self.batch {
            return Err(format!("tokens for {} of {} sequences", tokens.len(), self.batch).into());
        }
        let (ids, _) = joined(tokens)?;
        check_ids(&ids)?;
        self.advance(&ids)
    }

    /// Runs one call on new tokens, and keeps what it returns of the cache.
    fn advance(&mut self, ids: &[i64]) -> Result<Vec<Vec<f32>>> {
        let new = ids.len() / self.batch;
        if self.length + new > self.limit() {
            return Err(format!("a sequence has at most {} tokens here", self.limit()).into());
        }
        let first = self.length == 0;
        if first {
            self.fill()?;
        }
        let mut feeds: Feeds<'_> = self.inputs(ids)?;
        for slot in &CACHE {
            feeds.push((slot.past, (&self.cache[slot.past]).into()));
        }
        let mut outputs = self.decoder.run(feeds, OUTPUTS, self.trace.as_ref())?;
        for slot in &CACHE {
            let name = if first { slot.made } else { slot.present };
            if let Some(value) = name.and_then(|name| outputs.remove(name)) {
                self.cache.insert(slot.past, value); // releases the value before
            }
        }
        self.length += new;
        last_rows(&outputs[LOGITS], self.batch)
    }

    /// The inputs of a call beside the cache.
    fn inputs(&self, ids: &[i64]) -> Result<Feeds<'static>> {
        let batch = self.batch;
        let new = ids.len() / self.batch;
        let past = self.length;
        let total = self.length + ids.len() / self.batch;
        let tokens = Tensor::from_array(([batch, new], ids.to_vec()))?;
        let shape = [batch, total];
        let mask = Tensor::from_array((shape, mask(&shape, total, &self.padding)))?;
        let shape = [batch, new];
        let positions = Tensor::from_array((shape, positions(&shape, past, &self.padding)))?;
        Ok(vec![
            ("input_ids", tokens.into()),
            ("attention_mask", mask.into()),
            ("position_ids", positions.into()),
        ])
    }

    /// Fills the cache with what the first call is fed: zeros.
    fn fill(&mut self) -> Result<()> {
        for slot in &CACHE {
            let size = |axis: &Axis| match axis {
                Size(size) => *size,
                Batch => self.batch,
                Past => 0,
            };
            let shape: Vec<usize> = slot.shape.iter().map(size).collect();
            // Not made of data: up to 2.0.0-rc.12 that refuses a length of 0.
            let allocator = Allocator::default();
            let zeros = Tensor::<f32>::new(&allocator, shape)?.upcast();
            self.cache.insert(slot.past, zeros);
        }
        Ok(())
    }

    /// Forgets the last `count` tokens of every sequence. At least one token must stay.
    pub fn rewind(&mut self, count: usize) -> Result<()> {
        let padded = self.padding.iter().copied().max().unwrap_or(0);
        let shortest = self.length.saturating_sub(padded); // nothing is there after a reset
        if count >= shortest {
            return Err(format!("cannot forget {count} of {shortest} tokens").into());
        }
        self.length -= count;
        for slot in CACHE.iter().filter(|slot| slot.shape.contains(&Past)) {
            if let (Some(axis), Some(value)) = (slot.length_axis, self.cache.get_mut(slot.past)) {
                *value = rows(axis, &[(value, 0..self.length)])?;
            }
        }
        Ok(())
    }

    /// Makes row i of the batch a copy of what row `order[i]` was, as a beam search needs it.
    pub fn reorder(&mut self, order: &[usize]) -> Result<()> {
        if self.length == 0 {
            return Err("begin with prefill()".into());
        }
        if order.is_empty() || order.iter().any(|row| *row >= self.batch) {
            return Err(format!("{order:?} are not rows of {}", self.batch).into());
        }
        let taken = |axis: usize, heads: usize, value: &DynTensor| {
            let pieces = order.iter().map(|row| (value, row * heads..(row + 1) * heads));
            rows(axis, &pieces.collect::<Vec<_>>())
        };
        for slot in &CACHE {
            if let (Some(axis), Some(value)) = (slot.batch_axis, self.cache.get_mut(slot.past)) {
                *value = taken(axis, 1, value)?;
            }
        }
        self.padding = order.iter().map(|row| self.padding[*row]).collect();
        self.batch = order.len();
        Ok(())
    }

    /// Decodes until every sequence has ended; returns the new tokens of each, the stop token not
    /// among them.
    ///
    /// There are at most `most` new tokens, and no more than `limit()` with the prompt. `choose` picks a token of its row of logits, as
    /// `likeliest` does. `on_token` is called for each new token with the row and the token.
    pub fn generate(
        &mut self,
        prompts: &[impl AsRef<[i64]>],
        most: usize,
        stop: &[i64],
        mut choose: impl FnMut(&[f32]) -> i64,
        mut on_token: impl FnMut(usize, i64),
    ) -> Result<Vec<Vec<i64>>> {
        if most == 0 {
            return Err("the most new tokens are 1 or more".into());
        }
        let mut made = vec![Vec::new(); prompts.len()];
        let mut running = vec![true; prompts.len()];
        let mut logits = self.prefill(prompts)?;
        loop {
            let chosen: Vec<i64> = logits.iter().map(|row| choose(row)).collect();
            for (row, token) in chosen.iter().enumerate() {
                running[row] &= !stop.contains(token);
                if running[row] {
                    made[row].push(*token);
                    on_token(row, *token);
                }
            }
            if !running.contains(&true) || made.iter().any(|row| row.len() >= most) {
                return Ok(made);
            }
            if self.length >= self.limit() {
                return Ok(made);
            }
            logits = self.step(&chosen.iter().map(|token| [*token]).collect::<Vec<_>>())?;
        }
    }
}

/// The environment of the runtime. ort 2.0.0-rc.10 makes it by itself; the newest release does not,
/// and allows one in a process: a program that has its own puts it here.
#[cfg(not(feature = "ort-rc10"))]
static ENVIRONMENT: LazyLock<ort::Result<Environment>> = LazyLock::new(|| ort::init().build());

/// One file of the model.
struct Graph {
    file: &'static str,
    session: Session,
}

impl Graph {
    fn open(folder: &Path, file: &'static str, provider: &Provider) -> Result<Self> {
        #[cfg(feature = "ort-rc10")]
        let builder = Session::builder()?;
        #[cfg(not(feature = "ort-rc10"))]
        let environment = ENVIRONMENT.as_ref().map_err(|error| error.to_string())?;
        #[cfg(not(feature = "ort-rc10"))]
        let builder = Session::builder(environment)?;
        #[allow(unused_mut)] // 2.0.0-rc.10 takes the builder itself
        let mut builder = builder
            .with_execution_providers((provider.add)())
            .map_err(|error| format!("{}: {error}", provider.name))?;
        let path = folder.join(file);
        let session = builder.commit_from_file(&path);
        let session = session.map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Self { file, session })
    }

    /// Runs one call. The views in `feeds` end with it; what it returns belongs to the caller, and
    /// stays in the runtime's memory.
    fn run(
        &mut self,
        feeds: Feeds<'_>,
        names: &[&'static str],
        trace: Option<&Trace>,
    ) -> Result<Tensors> {
        let selected = names.iter().fold(OutputSelector::no_default(), |all, name| all.with(*name));
        let options = RunOptions::new()?.with_outputs(selected);
        let fed: Vec<_> = match trace {
            Some(_) => feeds.iter().map(|(name, value)| trace::entry(name, value)).collect(),
            None => Vec::new(),
        };
        let result = self.session.run_with_options(feeds, &options);
        if let Some(trace) = trace {
            let got: Vec<_> = match &result {
                Ok(outputs) => names.iter().map(|one| trace::entry(one, &outputs[*one])).collect(),
                Err(_) => Vec::new(),
            };
            let error = result.as_ref().err().map(|error| error.to_string());
            trace.write(self.file, &fed, &got, error.as_deref())?;
        }
        let mut tensors = Tensors::new();
        for (name, (_, value)) in names.iter().zip(result?) {
            tensors.insert(name, value.downcast::<DynTensorValueType>()?);
        }
        Ok(tensors)
    }
}

/// The rows of a batch one behind the other, and the length that all of them have.
fn joined(rows: &[impl AsRef<[i64]>]) -> Result<(Vec<i64>, usize)> {
    let length = rows.first().map_or(0, |row| row.as_ref().len());
    if length == 0 || rows.iter().any(|row| row.as_ref().len() != length) {
        return Err("the rows of a batch must have the same length, and not 0".into());
    }
    Ok((rows.iter().flat_map(|row| row.as_ref()).copied().collect(), length))
}

/// Refuses ids that are no tokens of the model.
fn check_ids(ids: &[i64]) -> Result<()> {
    match ids.iter().find(|id| !(0..VOCABULARY).contains(*id)) {
        Some(id) => Err(format!("token ids are 0 to {}, not {id}", VOCABULARY - 1).into()),
        None => Ok(()),
    }
}

/// The logits of the last new token of each sequence.
fn last_rows(logits: &DynTensor, batch: usize) -> Result<Vec<Vec<f32>>> {
    let (shape, count) = (logits.shape(), logits.shape().iter().product::<i64>() as usize);
    let rows = if shape.len() == 3 { shape[1] as usize } else { 1 };
    if count == 0 || !count.is_multiple_of(batch * rows) {
        return Err(format!("{shape:?} are not the logits of {batch} sequences").into());
    }
    let (_, data) = logits.try_extract_tensor::<f32>()?;
    let (sequence, row) = (count / batch, count / batch / rows);
    Ok(data.chunks(sequence).map(|rows| rows[sequence - row..].to_vec()).collect())
}

/// The elements of a tensor, from their columns and the padding of their rows.
fn by_row(shape: &[usize], padding: &[usize], value: impl Fn(usize, usize) -> i64) -> Vec<i64> {
    let columns = shape[shape.len() - 1];
    let padding = if shape.len() > 1 { padding } else { &[0] };
    (0..shape.iter().product())
        .map(|at: usize| value(at % columns, padding[at / columns % padding.len()]))
        .collect()
}

/// 1 for tokens; 0 for padding on the left, and for what lies behind the last token.
fn mask(shape: &[usize], total: usize, padding: &[usize]) -> Vec<i64> {
    by_row(shape, padding, |column, padding| i64::from(column >= padding && column < total))
}

/// The positions of the new tokens; padding on the left is not counted.
fn positions(shape: &[usize], past: usize, padding: &[usize]) -> Vec<i64> {
    by_row(shape, padding, |column, padding| (past + column).saturating_sub(padding) as i64)
}

/// Rows of tensors one behind the other along an axis. It copies bytes, whatever the elements are.
fn rows(axis: usize, pieces: &[(&DynTensor, Range<usize>)]) -> Result<DynTensor> {
    let (first, _) = pieces.first().ok_or("there are no rows")?;
    if pieces.iter().any(|(value, rows)| rows.end > value.shape()[axis] as usize) {
        return Err(format!("the cache has fewer rows than tokens: {:?}", first.shape()).into());
    }
    let mut shape = first.shape().to_vec();
    let blocks = shape[..axis].iter().product::<i64>() as usize;
    shape[axis] = pieces.iter().map(|(_, rows)| rows.len() as i64).sum();
    let mut made = DynTensor::new(&Allocator::default(), *first.data_type(), shape)?;
    let mut rest = bytes_mut(&mut made);
    for block in 0..blocks {
        for (value, rows) in pieces.iter().filter(|(_, rows)| !rows.is_empty()) {
            let length = value.shape()[axis] as usize;
            let data = bytes(value);
            let row = data.len() / (blocks * length);
            let begin = (block * length + rows.start) * row;
            let (part, behind) = rest.split_at_mut(rows.len() * row);
            part.copy_from_slice(&data[begin..begin + rows.len() * row]);
            rest = behind;
        }
    }
    Ok(made)
}

/// The size of a tensor in bytes.
#[allow(clippy::useless_conversion)] // usize up to 2.0.0-rc.10, Option<usize> in later releases
fn size(value: &DynTensor) -> usize {
    let count = value.shape().iter().product::<i64>() as usize;
    let size: Option<usize> = value.data_type().byte_size(count).into();
    size.unwrap_or(0)
}

fn bytes(value: &DynTensor) -> &[u8] {
    match size(value) {
        0 => &[], // the pointer may be null
        // SAFETY: the runtime holds so many bytes there, in host memory, as long as the value lives.
        size => unsafe { std::slice::from_raw_parts(value.data_ptr().cast(), size) },
    }
}

fn bytes_mut(value: &mut DynTensor) -> &mut [u8] {
    match size(value) {
        0 => &mut [],
        // SAFETY: as above; the value is borrowed, so nothing else reads or writes it.
        size => unsafe { std::slice::from_raw_parts_mut(value.data_ptr_mut().cast(), size) },
    }
}

/// The token with the largest logit, and the first of them where several are as large.
pub fn likeliest(logits: &[f32]) -> i64 {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best as i64
}
