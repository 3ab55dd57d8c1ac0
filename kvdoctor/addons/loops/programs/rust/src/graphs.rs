//! The files of the model as sessions of the runtime, and the trace of their calls.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::Path;

use half::{bf16, f16};
use ort::environment::Environment;
use ort::session::{OutputSelector, RunOptions, Session, SessionInputValue};
use ort::value::{DynTensor, DynValue, Outlet, ValueType};
use serde_json::{Map, Value, json};

use crate::contract::{Call, Contract, File, Port};
use crate::decoder::Settings;
use crate::{Error, Result};

/// Inputs of a call by name. Those of the cache are views: they copy nothing, and end with the call.
pub type Feeds<'a> = Vec<(&'a str, SessionInputValue<'a>)>;

/// Values of the runtime by name.
pub type Tensors = HashMap<String, DynTensor>;

/// The sessions, by the names of their files.
pub struct Graphs {
    sessions: HashMap<String, Session>,
    pub trace: Option<Trace>,
}

impl Graphs {
    pub fn open(environment: &Environment, folder: &Path, contract: &Contract, settings: &Settings) -> Result<Self> {
        let mut sessions = HashMap::new();
        for file in &contract.files {
            let mut builder = Session::builder(environment)?.with_execution_providers(&settings.providers)?;
            if let Some(threads) = settings.threads {
                builder = builder.with_intra_threads(threads)?;
            }
            let session = builder.commit_from_file(folder.join(&file.file))?;
            compare(file, &session)?;
            sessions.insert(file.file.clone(), session);
        }
        Ok(Self { sessions, trace: None })
    }

    /// Runs a call. What it returns belongs to the caller, and stays in the runtime's memory.
    pub fn run(&mut self, call: &Call, feeds: Feeds<'_>) -> Result<Tensors> {
        let session = self.sessions.get_mut(&call.file);
        let session = session.ok_or_else(|| Error::Contract(format!("it does not list the file {:?}", call.file)))?;
        let selected = call.outputs.iter().fold(OutputSelector::no_default(), |all, name| all.with(name));
        let options = RunOptions::new()?.with_outputs(selected);
        let fed =
            self.trace.as_ref().map(|_| feeds.iter().map(|(name, value)| entry(name, value)).collect::<Map<_, _>>());
        let result = session.run_with_options(feeds, &options);
        if let (Some(trace), Some(fed)) = (&mut self.trace, fed) {
            let got: Map<_, _> =
                result.iter().flat_map(|all| all.iter()).map(|(name, value)| entry(name, &value)).collect();
            let error = result.as_ref().err().map(ToString::to_string);
            let line = json!({"file": call.file, "fed": fed, "got": got, "error": error}).to_string();
            trace(line).map_err(|error| Error::File("the trace".into(), error))?;
        }
        result?.into_iter().map(|(name, value)| Ok((name.to_owned(), value.downcast()?))).collect()
    }
}

/// Compares a session with what the contract says of its file.
fn compare(file: &File, session: &Session) -> Result<()> {
    let (inputs, outputs) = (session.inputs().iter(), session.outputs().iter().map(Outlet::name));
    let strange = inputs.clone().filter(|input| file.inputs.get(input.name()).is_none_or(|port| !fits(input, port)));
    let strange = strange.map(|input| format!("the input {:?} of {}", input.name(), input.dtype()));
    let known: HashSet<&str> = inputs.map(Outlet::name).chain(outputs).collect();
    let missing = file.inputs.keys().chain(&file.outputs).filter(|name| !known.contains(name.as_str()));
    match strange.chain(missing.map(|name| format!("no {name:?}"))).next() {
        Some(found) => Err(Error::Contract(format!("contract.json is of another model: {} has {found}", file.file))),
        None => Ok(()),
    }
}

/// Whether an input has the element type and the fixed sizes of the contract.
fn fits(outlet: &Outlet, port: &Port) -> bool {
    let ValueType::Tensor { ty, shape, .. } = outlet.dtype() else {
        return false;
    };
    // A graph that declares no shape looks like one of a scalar here.
    let agree = shape.iter().zip(&port.shape).all(|(size, due)| *size < 0 || size == due);
    *ty == port.dtype && (shape.is_empty() || shape.len() == port.shape.len() && agree)
}

/// Takes each call as a line of JSON: `kvdoctor step-test MODEL --trace FILE` reads it.
pub type Trace = Box<dyn FnMut(String) -> io::Result<()> + Send>;

/// A tensor in a trace: its element type, its shape and its elements; those that the host cannot read are left out.
fn entry(name: &str, value: &DynValue) -> (String, Value) {
    let mut entry = json!({"dtype": value.data_type().to_string(), "shape": value.shape().to_vec()});
    macro_rules! elements {
        ($($kind:ty: $of:expr),*) => {
            $(if let Ok((_, data)) = value.try_extract_tensor::<$kind>() {
                let (name, elements) = sample(data, $of);
                entry[name] = elements;
            })*
        };
    }
    elements!(f32: |one| json!(one), f64: |one| json!(one), f16: |one: &f16| json!(one.to_f32()));
    elements!(bf16: |one: &bf16| json!(one.to_f32()), bool: |one| json!(one), i64: |one| json!(one));
    elements!(i32: |one| json!(one), i8: |one| json!(one), u8: |one| json!(one));
    (name.to_owned(), entry)
}

/// All elements of a tensor that has no more than 64, and so many of a larger one.
fn sample<T>(data: &[T], of: impl Fn(&T) -> Value) -> (&'static str, Value) {
    match data.len() {
        0..=64 => ("data", data.iter().map(of).collect()),
        length => ("sample", (0..64).map(|at| of(&data[at * (length - 1) / 63])).collect()),
    }
}
