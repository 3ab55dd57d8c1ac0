//! `contract.json`: what each call is fed, and what becomes of its outputs.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::str::FromStr;

use ort::value::{IntoTensorElementType, TensorElementType};
use serde::Deserialize;
use serde_json::Value;

use crate::tensors::with_type;
use crate::{Error, Result};

/// The schema that this program reads.
pub const SCHEMA: &str = "kvdoctor/loop/2";

#[derive(Clone, Debug, Deserialize)]
pub struct Contract {
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
    #[serde(default)]
    pub placeholders: Vec<i64>,
    pub generation: Generation,
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
    pub dtype: Dtype,
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
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Call {
    pub file: String,
    pub inputs: Vec<Input>,
    pub pasts: Vec<String>,
    pub outputs: Vec<String>,
    pub logits: Option<String>,
    pub states: Option<String>,
}

/// One input that is not the cache.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Input {
    pub name: String,
    pub dtype: Dtype,
    pub dims: Vec<Dim>,
    pub rule: Rule,
    pub count: Count,
    pub value: f64,
    pub shown: f64,
    pub hidden: f64,
    pub from_right: bool,
    pub made: Option<String>,
}

/// One tensor of the cache.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Slot {
    pub past: String,
    pub present: Option<String>,
    pub made: Option<String>,
    pub by_encoder: bool,
    pub dtype: Dtype,
    pub dims: Vec<Dim>,
    pub carry: Carry,
    pub batch_axis: Option<usize>,
    pub length_axis: Option<usize>,
    pub counts_states: bool,
    pub rewinds: Rewinds,
    pub first_length: usize,
    pub heads: usize,
    pub fed_zeros: bool,
}

/// Enums whose variants are names in the contract.
macro_rules! names {
    ($($case:literal $name:ident { $($variant:ident),* $(; $(#[$attribute:meta])* $other:ident)? })*) => {
        $(#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
        #[serde(rename_all = $case)]
        pub(crate) enum $name {
            $($variant,)*
            $($(#[$attribute])* $other,)?
        })*
    };
}

names! {
    "lowercase" Dtype { Float, Float16, Bfloat16, Double, Int64, Int32, Int8, Uint8, Bool }
    // What an axis counts; one that no loop counts has size 1.
    "snake_case" Axis { Batch, BatchHeads, New, Past, Total, Capacity, Encoder, EncoderInput; #[serde(other)] Other }
    // Where the value of an input comes from.
    "kebab-case" Rule {
        Tokens, TokenAndPosition, Embeddings, AttentionMask, PaddingMask, WindowMask, CausalMask, Positions, Rows,
        Number, EncoderInput, EncoderMask, EncoderStates
    }
    "kebab-case" Count {
        Constant, Past, Total, Last, New, LastNew, Batch, Cached, First;
        #[serde(rename = "encoder_input")] EncoderInput
    }
    // What becomes of an output of the cache. FeedBack: it is the next value. Hold: the first value stays. Append: its
    // rows follow those that are there. Write: its rows are written after those of the tokens before. Shift: its rows
    // come in on one side, and the oldest leave on the other. DropOldest: it is the next value without its oldest row.
    "kebab-case" Carry { FeedBack, Hold, Append, Write, Shift, DropOldest }
    // How a slot goes back to an earlier length.
    "lowercase" Rewinds { Cut, Stays, Impossible }
}

impl From<Dtype> for TensorElementType {
    fn from(dtype: Dtype) -> Self {
        with_type!(dtype, T => T::into_tensor_element_type())
    }
}

/// A number, or what an axis counts.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(crate) enum Dim {
    Size(usize),
    Axis(Axis),
}

impl Contract {
    /// Reads a file.
    pub fn read(file: impl AsRef<Path>) -> Result<Self> {
        let shown = file.as_ref().display().to_string();
        match fs::read_to_string(file) {
            Ok(text) => text.parse().map_err(|error| Error::Contract(format!("{shown}: {error}"))),
            Err(error) => Err(Error::File(shown, error)),
        }
    }

    /// Whether the source is ids; `None` where the model has none.
    pub fn source_is_ids(&self) -> Option<bool> {
        self.source.as_ref().map(|source| matches!(source.dtype, Dtype::Int64 | Dtype::Int32))
    }
}

/// Refuses rules that this program does not know, with the name of the tensor that needs them.
fn check(contract: &Value) -> Result<()> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let calls = contract["calls"].as_object().into_iter().flat_map(|calls| calls.values());
    let unknown = |one: &Value| {
        let name = one.get("name").or(one.get("past")).unwrap_or(&Value::Null);
        let known = [
            ("rule", one.get("rule").is_none_or(|rule| Rule::deserialize(rule).is_ok())),
            ("count", one.get("count").is_none_or(|count| Count::deserialize(count).is_ok())),
            ("carry", one.get("carry").is_none_or(|carry| Carry::deserialize(carry).is_ok())),
        ];
        let (field, _) = known.into_iter().find(|(_, known)| !known)?;
        Some(format!("{name} has the {field} {}, which this program does not know", one[field]))
    };
    let inputs = calls.flat_map(|call| list(&call["inputs"]));
    match inputs.chain(list(&contract["slots"])).find_map(|one| unknown(&one)) {
        Some(message) => Err(Error::Contract(message)),
        None => Ok(()),
    }
}

impl FromStr for Contract {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let unread = |error: serde_json::Error| Error::Contract(error.to_string());
        let contract: Value = serde_json::from_str(text).map_err(unread)?;
        if contract["schema"] != SCHEMA {
            let schema = &contract["schema"];
            return Err(Error::Contract(format!("the schema is {schema}, and this program reads {SCHEMA:?}")));
        }
        check(&contract)?;
        serde_json::from_value(contract).map_err(unread)
    }
}
