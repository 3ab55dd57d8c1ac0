//! `contract.json`: what each call is fed, and what becomes of its outputs.

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
    pub(crate) slots: Vec<Slot>,
    pub(crate) source: Option<Input>,
    /// Token ids are smaller than this.
    pub vocabulary: Option<i64>,
    /// The most tokens of a sequence.
    pub context_limit: Option<usize>,
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
    #[serde(rename = "kvdoctor/loop/2")]
    Second,
}

/// Where a text ends, and what is left out of it: at first the ids of the model's configs.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Generation {
    /// What a prompt begins with.
    pub start: Vec<i64>,
    /// Ids that end a sequence; they are not among its tokens.
    pub end: Vec<i64>,
    /// Fed to a sequence that has ended.
    pub padding: Option<i64>,
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

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Port {
    #[serde(with = "Dtype")]
    pub dtype: TensorElementType,
    pub dims: Vec<Dim>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Calls {
    pub encode: Option<Call>,
    pub embed: Option<Call>,
    pub prefill: Call,
    pub decode: Call,
}

impl Calls {
    pub fn iter(&self) -> impl Iterator<Item = &Call> {
        self.encode.iter().chain(&self.embed).chain([&self.prefill, &self.decode])
    }

    /// Whether any call has an input of a rule.
    pub fn follow(&self, rule: Rule) -> bool {
        self.iter().flat_map(|call| &call.inputs).any(|input| input.rule == rule)
    }
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Call {
    pub file: String,
    pub inputs: Vec<Input>,
    pub pasts: Vec<String>,
    pub outputs: Vec<String>,
    pub logits: Option<String>,
    pub fills: Vec<Fill>,
    pub encoder: Option<EncoderSize>,
}

/// An output that goes into a slot of the cache.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Fill {
    pub slot: usize,
    pub output: String,
    pub carry: Carry,
}

/// The axis that counts encoder states, of a value of the encoder or of the cache; without a name of the source.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct EncoderSize {
    pub name: Option<String>,
    pub axis: usize,
}

/// One input that is not the cache.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Input {
    pub name: String,
    #[serde(with = "Dtype")]
    pub dtype: TensorElementType,
    pub dims: Vec<Dim>,
    pub rule: Rule,
    pub count: Axis,
    pub value: f64,
    pub shown: f64,
    pub hidden: f64,
    pub from_right: bool,
    pub rows_from: Option<Axis>,
    pub batch_axis: Option<usize>,
    pub made: Option<String>,
}

/// One tensor of the cache.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Slot {
    pub past: String,
    #[serde(with = "Dtype")]
    pub dtype: TensorElementType,
    pub batch_axis: Option<usize>,
    pub length_axis: Option<usize>,
    pub rewinds: String,
    pub heads: usize,
    pub zeros: Option<Vec<Dim>>,
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

/// Enums whose variants are names in the contract; `Other` is a name that this program does not know.
macro_rules! names {
    ($($(#[$about:meta])* $name:ident { $($(#[$attribute:meta])* $variant:ident),* })*) => {
        $($(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        pub(crate) enum $name {
            $($(#[$attribute])* $variant,)*
            #[serde(other)]
            Other,
        })*
    };
}

names! {
    /// What an axis or a number counts; another axis has size 1.
    Axis {
        Batch, #[serde(alias = "batch_heads")] BatchHeads, New, Past, Total, Capacity, Encoder,
        #[serde(alias = "encoder_input")] EncoderInput, Last, LastNew, Constant
    }
    /// Where the value of an input comes from.
    Rule {
        Tokens, TokenAndPosition, Embeddings, Positions, Rows, Number, EncoderInput, EncoderMask, EncoderStates,
        #[serde(alias = "attention-mask", alias = "padding-mask", alias = "window-mask", alias = "causal-mask")] Mask
    }
    /// What becomes of an output of the cache. FeedBack: it is the next value. Hold: the first value stays. Append: its
    /// rows follow those that are there. Write: its rows are written after those of the tokens before. Shift: its rows
    /// come in on one side, and the oldest leave on the other. DropOldest: it is the next value without its oldest row.
    Carry { FeedBack, Hold, Append, Write, Shift, DropOldest }
}

/// A number, or what an axis counts.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(crate) enum Dim {
    Size(usize),
    Axis(Axis),
}

impl Contract {
    pub fn read(file: impl AsRef<Path>) -> Result<Self> {
        let shown = file.as_ref().display().to_string();
        match fs::read_to_string(file) {
            Ok(text) => text.parse().map_err(|error| Error::Contract(format!("{shown}: {error}"))),
            Err(error) => Err(Error::File(shown, error)),
        }
    }

    /// Whether the source is ids; `None` where the model has none.
    pub fn source_is_ids(&self) -> Option<bool> {
        let is_ids = |source: &Input| matches!(source.dtype, TensorElementType::Int64 | TensorElementType::Int32);
        self.source.as_ref().map(is_ids)
    }
}

impl FromStr for Contract {
    type Err = Error;

    /// Reads a contract; what it asks for and this program does not know is an error, with the name of the tensor.
    fn from_str(text: &str) -> Result<Self> {
        let contract: Self = serde_json::from_str(text).map_err(|error| Error::Contract(error.to_string()))?;
        let unknown = |input: &&Input| input.rule == Rule::Other || input.count == Axis::Other;
        let inputs = contract.calls.iter().flat_map(|call| &call.inputs).filter(unknown).map(|input| &input.name);
        let fills = contract.calls.iter().flat_map(|call| &call.fills);
        let unknown = |fill: &&Fill| fill.carry == Carry::Other || fill.slot >= contract.slots.len();
        let fills = fills.filter(unknown).map(|fill| &fill.output);
        if let Some(name) = inputs.chain(fills).next() {
            return Err(Error::Contract(format!("{name:?} has a rule that this program does not know")));
        }
        Ok(contract)
    }
}
