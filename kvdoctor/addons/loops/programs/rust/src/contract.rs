//! `contract.json`: what each call is fed, and what becomes of its outputs. Made by kvdoctor, it needs no check of its own.

use std::{collections::HashMap, fs, path::Path, str::FromStr};

use ort::value::TensorElementType;
use serde::Deserialize;

use crate::{Error, Result};

#[derive(Clone, Debug, Deserialize)]
pub struct Contract {
    #[serde(rename = "schema")]
    _schema: Schema,
    pub model: String,
    pub(crate) files: Vec<File>,
    pub(crate) calls: Calls,
    /// The values before the first call.
    pub(crate) zeros: Vec<Zeros>,
    /// What a rewind cuts, and what a reorder changes.
    pub(crate) cut: Vec<Axis>,
    pub(crate) rows: Vec<Axis>,
    pub(crate) heads: usize,
    pub(crate) source: Option<Source>,
    /// Token ids are smaller than this.
    pub vocabulary: i64,
    /// The most tokens of the cache.
    pub context_limit: usize,
    /// The most tokens of a sequence: those that do not fit are written over the oldest.
    pub longest: usize,
    pub(crate) one_token: bool,
    /// The number of sequences, where the graph takes one number only.
    pub batch: Option<usize>,
    pub(crate) capacity_is_chosen: bool,
    /// Whether prompts of a batch may differ in length.
    pub pads: bool,
    /// Whether a step may take several tokens.
    pub chunks: bool,
    pub rewinds: bool,
    pub reorders: bool,
    /// Token ids whose places are for images or audio, which this program does not take.
    pub placeholders: Vec<i64>,
    pub generation: Generation,
}

#[derive(Clone, Debug, Deserialize)]
enum Schema {
    #[serde(rename = "kvdoctor/loop/4")]
    Fourth,
}

/// Where a text ends, and what is left out of it: at first the ids of the model's configs.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Generation {
    /// What a prompt begins with.
    pub start: Vec<i64>,
    /// Ids that end a sequence; they are not among its tokens.
    pub end: Vec<i64>,
    /// Ids that are never chosen.
    pub suppress: Vec<i64>,
    /// Ids that are not chosen as the first new token.
    pub begin_suppress: Vec<i64>,
    /// Places, counted from the first token of the prompt, with the id there.
    pub forced: Vec<(usize, i64)>,
    /// The most new tokens of a sequence; 0 sets no bound.
    #[serde(default)]
    pub most: usize,
}

/// One file of the model, and what a session of it must have.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct File {
    pub file: String,
    pub inputs: HashMap<String, Port>,
    pub outputs: Vec<String>,
}

/// The type and the sizes of an input; -1 is any.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Port {
    #[serde(with = "Dtype")]
    pub dtype: TensorElementType,
    pub shape: Vec<i64>,
}

/// The calls of each phase, in order.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Calls {
    pub encode: Vec<Call>,
    pub prefill: Vec<Call>,
    pub decode: Vec<Call>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Call {
    pub file: String,
    /// The names of the values that inputs are fed.
    pub values: HashMap<String, String>,
    pub made: Vec<Made>,
    pub outputs: Vec<String>,
    pub logits: Option<String>,
    pub takes: Vec<Take>,
    /// The sizes that only values have.
    pub sizes: HashMap<String, Axis>,
}

/// A sum: each named number times its factor.
pub(crate) type Terms = HashMap<String, f64>;

/// An input that is made for a call, row by row along its last axis. A row has `inside` from the column `begin` to before
/// `end`, and `step` more for each column, else `outside`; what `copy` names is written over it.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Made {
    pub name: String,
    #[serde(with = "Dtype")]
    pub dtype: TensorElementType,
    pub dims: Vec<Dim>,
    pub batch_axis: Option<usize>,
    pub copy: Option<Copied>,
    pub begin: Terms,
    pub end: Terms,
    pub inside: Terms,
    pub outside: f64,
    pub step: f64,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Copied {
    Tokens,
    /// Of the source.
    Mask,
}

/// An output of a call that becomes a value.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Take {
    pub output: String,
    pub value: String,
    pub carry: Carry,
    pub axis: Option<usize>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Carry {
    /// It is the next value.
    FeedBack,
    /// Its rows follow those that are there.
    Append,
    /// Its rows are written after those of the tokens before.
    Write,
    /// Its rows come in on one side, and the oldest leave on the other.
    Shift,
    /// It is the next value without its oldest row.
    DropOldest,
}

/// An axis of a value; a sequence has `each` rows of it.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Axis {
    pub value: String,
    pub axis: usize,
    pub each: usize,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Zeros {
    pub value: String,
    #[serde(with = "Dtype")]
    pub dtype: TensorElementType,
    pub dims: Vec<Dim>,
}

/// What the caller gives before the prompts; it may have a mask where it is `masked`.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Source {
    #[serde(with = "Dtype")]
    pub dtype: TensorElementType,
    pub dims: Vec<Dim>,
    pub batch_axis: Option<usize>,
    pub length_axis: usize,
    pub masked: bool,
}

/// The element types of the contract, by its names.
#[derive(Deserialize)]
#[serde(remote = "TensorElementType", rename_all = "lowercase")]
enum Dtype {
    #[serde(rename = "float")]
    Float32,
    Float16,
    Bfloat16,
    #[serde(rename = "double")]
    Float64,
    Int64,
    Int32,
    Int8,
    Uint8,
    Bool,
}

/// A number, or what an axis counts.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Dim {
    Size(usize),
    Axis(String),
}

impl Contract {
    pub fn read(file: impl AsRef<Path>) -> Result<Self> {
        let shown = file.as_ref().display().to_string();
        match fs::read_to_string(file) {
            Ok(text) => text.parse().map_err(|error| Error::Contract(format!("{shown}: {error}"))),
            Err(error) => Err(Error::File(shown, error)),
        }
    }
}

impl FromStr for Contract {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        serde_json::from_str(text).map_err(|error| Error::Contract(error.to_string()))
    }
}
