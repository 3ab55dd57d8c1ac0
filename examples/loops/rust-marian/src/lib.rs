//! The decode loop of marian-4.57.6 (layout optimum-merged), written by kvdoctor 0.1.0.
//!
//! ```no_run
//! # fn main() -> decode_loop::Result<()> {
//! let mut decoder = decode_loop::Decoder::open("path/to/the/model")?;
//! decoder.encode(&[[11, 12, 13]], None)?;
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

const ENCODER: &str = "encoder_model.onnx";
const DECODER: &str = "decoder_model_merged.onnx";
const LOGITS: &str = "logits";
/// The encoder states, as the encoder returns them.
const STATES: &str = "last_hidden_state";
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
    Encoder,
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

pub static CACHE: [Slot; 8] = [
    Slot {
        past: "past_key_values.0.decoder.key",
        made: Some("present.0.decoder.key"),
        present: Some("present.0.decoder.key"),
        shape: &[Batch, Size(4), Past, Size(8)],
        batch_axis: Some(0),
        length_axis: Some(2),
    },
    Slot {
        past: "past_key_values.0.decoder.value",
        made: Some("present.0.decoder.value"),
        present: Some("present.0.decoder.value"),
        shape: &[Batch, Size(4), Past, Size(8)],
        batch_axis: Some(0),
        length_axis: Some(2),
    },
    Slot {
        past: "past_key_values.0.encoder.key",
        made: Some("present.0.encoder.key"),
        present: None,
        shape: &[Batch, Size(4), Encoder, Size(8)],
        batch_axis: Some(0),
        length_axis: Some(2),
    },
    Slot {
        past: "past_key_values.0.encoder.value",
        made: Some("present.0.encoder.value"),
        present: None,
        shape: &[Batch, Size(4), Encoder, Size(8)],
        batch_axis: Some(0),
        length_axis: Some(2),
    },
    Slot {
        past: "past_key_values.1.decoder.key",
        made: Some("present.1.decoder.key"),
        present: Some("present.1.decoder.key"),
        shape: &[Batch, Size(4), Past, Size(8)],
        batch_axis: Some(0),
        length_axis: Some(2),
    },
    Slot {
        past: "past_key_values.1.decoder.value",
        made: Some("present.1.decoder.value"),
        present: Some("present.1.decoder.value"),
        shape: &[Batch, Size(4), Past, Size(8)],
        batch_axis: Some(0),
        length_axis: Some(2),
    },
    Slot {
        past: "past_key_values.1.encoder.key",
        made: Some("present.1.encoder.key"),
        present: None,
        shape: &[Batch, Size(4), Encoder, Size(8)],
        batch_axis: Some(0),
        length_axis: Some(2),
    },
    Slot {
        past: "past_key_values.1.encoder.value",
        made: Some("present.1.encoder.value"),
        present: None,
        shape: &[Batch, Size(4), Encoder, Size(8)],
        batch_axis: Some(0),
        length_axis: Some(2),
    },
];

const ENCODED: &[&str] = &["last_hidden_state"];
/// What the first call returns.
const FIRST_OUTPUTS: &[&str] = &[
    "logits",
    "present.0.decoder.key",
    "present.0.decoder.value",
    "present.0.encoder.key",
    "present.0.encoder.value",
    "present.1.decoder.key",
    "present.1.decoder.value",
    "present.1.encoder.key",
    "present.1.encoder.value",
];
const OUTPUTS: &[&str] = &[
    "logits",
    "present.0.decoder.key",
    "present.0.decoder.value",
    "present.1.decoder.key",
    "present.1.decoder.value",
];

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
    encoder: Graph,
    decoder: Graph,
    trace: Option<Trace>,
    length: usize,
    batch: usize,
    /// What belongs to the source. It outlives the sequences: `prefill` may follow more than once.
    encoded: Tensors,
    /// How many sequences the source is for.
    sources: usize,
    source_mask: Option<Vec<Vec<i64>>>,
    /// Whether what belongs to the source has been reordered.
    moved: bool,
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
            encoder: Graph::open(folder, ENCODER, provider)?,
            decoder: Graph::open(folder, DECODER, provider)?,
            trace: Trace::from_environment()?,
            length: 0,
            batch: 0,
            encoded: Tensors::new(),
            sources: 0,
            source_mask: None,
            moved: false,
            cache: Tensors::new(),
        })
    }

    /// Tokens in the cache.
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

    /// Begins anew: no sequences, and nothing encoded.
    pub fn reset(&mut self) {
        self.length = 0;
        self.cache.clear();
        self.encoded.clear();
        self.source_mask = None;
        self.moved = false;
    }

    /// Runs the encoder; the sequences after it are about this source.
    ///
    /// The source is int64[batch, encoder_input], a row for each sequence.
    /// The mask has a row for each sequence, with 0 for padding on the right; without it all of the
    /// source is read.
    pub fn encode(
        &mut self,
        source: &[impl AsRef<[i64]>],
        mask: Option<&[Vec<i64>]>,
    ) -> Result<()> {
        self.reset();
        let (ids, encoder_input) = joined(source)?;
        if ids.iter().any(|id| *id < 0) {
            return Err("the ids of the source are 0 or more".into()); // a Gather counts others from the end
        }
        let batch = source.len();
        self.sources = batch;
        let source = Tensor::from_array(([batch, encoder_input], ids))?;
        if let Some(mask) = mask {
            check_mask(mask, &[batch, encoder_input])?;
            self.source_mask = Some(mask.to_vec());
        }
        let shape = [batch, encoder_input];
        let encoder_mask = Tensor::from_array((shape, self.encoder_mask(&shape)))?;
        let feeds = vec![("input_ids", source.into()), ("attention_mask", encoder_mask.into())];
        self.encoded = self.encoder.run(feeds, ENCODED, self.trace.as_ref())?;
        Ok(())
    }

    /// Begins sequences with their prompts; returns the last logits of each.
    pub fn prefill(&mut self, prompts: &[impl AsRef<[i64]>]) -> Result<Vec<Vec<f32>>> {
        if self.encoded.is_empty() || self.moved {
            return Err("begin with encode(), and again after reorder()".into());
        }
        let (ids, _) = joined(prompts)?; // this model takes no padding
        check_ids(&ids)?;
        if prompts.len() != self.sources {
            let sources = self.sources;
            return Err(format!("{} prompts for {sources} sources", prompts.len()).into());
        }
        self.length = 0;
        self.batch = prompts.len();
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
        let names = if first { FIRST_OUTPUTS } else { OUTPUTS };
        let mut feeds: Feeds<'_> = self.inputs(ids)?;
        feeds.push(("encoder_hidden_states", (&self.encoded[STATES]).into()));
        for slot in &CACHE {
            feeds.push((slot.past, (&self.cache[slot.past]).into()));
        }
        let mut outputs = self.decoder.run(feeds, names, self.trace.as_ref())?;
        for slot in &CACHE {
            let name = if first { slot.made } else { slot.present };
            if let Some(value) = name.and_then(|name| outputs.remove(name)) {
                self.cache.insert(slot.past, value); // releases the value before
            }
        }
        self.length += new;
        last_rows(&outputs[LOGITS], self.batch)
    }

    /// The inputs of a call beside what the encoder made and the cache.
    fn inputs(&self, ids: &[i64]) -> Result<Feeds<'static>> {
        let batch = self.batch;
        let new = ids.len() / self.batch;
        let past = self.length;
        let encoder = self.encoder_length();
        let shape = [batch, encoder];
        let encoder_mask = Tensor::from_array((shape, self.encoder_mask(&shape)))?;
        let tokens = Tensor::from_array(([batch, new], ids.to_vec()))?;
        let cached = Tensor::from_array(([1], vec![past > 0; 1]))?;
        Ok(vec![
            ("encoder_attention_mask", encoder_mask.into()),
            ("input_ids", tokens.into()),
            ("use_cache_branch", cached.into()),
        ])
    }

    /// Fills the cache with what the first call is fed: zeros that its branch does not read.
    fn fill(&mut self) -> Result<()> {
        for slot in &CACHE {
            let size = |axis: &Axis| match axis {
                Size(size) => *size,
                Batch => self.batch,
                Past | Encoder => 1,
            };
            let shape: Vec<usize> = slot.shape.iter().map(size).collect();
            let allocator = Allocator::default();
            let zeros = Tensor::<f32>::new(&allocator, shape)?.upcast();
            self.cache.insert(slot.past, zeros);
        }
        Ok(())
    }

    /// Forgets the last `count` tokens of every sequence. At least one token must stay.
    pub fn rewind(&mut self, count: usize) -> Result<()> {
        let shortest = self.length;
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
        for value in self.encoded.values_mut() {
            *value = taken(0, 1, value)?;
        }
        if let Some(mask) = &mut self.source_mask {
            *mask = order.iter().map(|row| mask[*row].clone()).collect();
        }
        self.moved = true;
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

    /// The number of encoder states.
    fn encoder_length(&self) -> usize {
        self.encoded[STATES].shape()[1] as usize
    }

    /// The mask given to `encode`, else ones: a mask of another length belongs to the encoder alone.
    fn encoder_mask(&self, shape: &[usize]) -> Vec<i64> {
        let given = self.source_mask.as_ref().filter(|mask| fits(mask, shape));
        given.map_or_else(|| vec![1; shape.iter().product()], |rows| rows.concat())
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

/// Whether a mask, a row for each sequence, has the elements of a shape.
fn fits(mask: &[Vec<i64>], shape: &[usize]) -> bool {
    let columns = shape[shape.len() - 1];
    mask.len() * columns == shape.iter().product() && mask.iter().all(|row| row.len() == columns)
}

/// Refuses a mask that has another shape than the source.
fn check_mask(mask: &[Vec<i64>], shape: &[usize]) -> Result<()> {
    let (_, columns) = joined(mask)?;
    if !fits(mask, shape) {
        let got = [mask.len(), columns];
        return Err(format!("the mask has shape {shape:?} here; got {got:?}").into());
    }
    Ok(())
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
