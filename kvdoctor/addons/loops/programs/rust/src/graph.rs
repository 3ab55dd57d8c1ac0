//! The files of the model as sessions of the runtime, and the calls that they are opened for.

use std::collections::HashMap;
use std::path::Path;

use ort::environment::Environment;
use ort::session::{HasSelectedOutputs, OutputSelector, RunOptions, Session, SessionInputValue};
use ort::value::{DynTensor, DynTensorValueType, Outlet, ValueType};

use crate::contract::{Call, Contract, Dim, File, Port, Slot};
use crate::decoder::Settings;
use crate::trace::{Trace, entry};
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

/// One kind of call, ready to be run.
pub struct Prepared {
    options: RunOptions<HasSelectedOutputs>,
    /// What it returns, in this order.
    pub outputs: Vec<String>,
    /// Which slots are fed.
    pub pasts: Vec<usize>,
    /// Which output goes to which slot.
    pub filled: Vec<(usize, usize)>,
    /// Which output has the logits.
    pub logits: usize,
}

impl Graphs {
    pub fn open(environment: &Environment, folder: &Path, contract: &Contract, settings: &Settings) -> Result<Self> {
        let mut sessions = HashMap::new();
        for file in &contract.files {
            let mut builder = Session::builder(environment)?
                .with_execution_providers(&settings.providers)
                .map_err(ort::Error::<()>::from)?;
            if let Some(threads) = settings.threads {
                builder = builder.with_intra_threads(threads).map_err(ort::Error::<()>::from)?;
            }
            let session = builder.commit_from_file(folder.join(&file.file))?;
            check(file, &session)?;
            sessions.insert(file.file.clone(), session);
        }
        Ok(Self { sessions, trace: None })
    }

    /// What a kind of call needs; `fills` is the output that goes to a slot.
    pub fn prepare(
        &self,
        call: &Call,
        contract: &Contract,
        fills: impl Fn(&Slot) -> Option<&String>,
    ) -> Result<Prepared> {
        let session = self.sessions.get(&call.file);
        let session = session.ok_or_else(|| unlisted(&format!("file {:?}", call.file)))?;
        let names = session.outputs().iter().map(Outlet::name);
        let outputs: Vec<String> =
            names.filter(|name| call.outputs.iter().any(|one| one == name)).map(str::to_owned).collect();
        let place = |name: &String| outputs.iter().position(|one| one == name);
        let mut filled = Vec::new();
        for (index, slot) in contract.slots.iter().enumerate() {
            if let Some(name) = fills(slot) {
                filled.push((index, place(name).ok_or_else(|| unlisted(&format!("output {name:?}")))?));
            }
        }
        let slot = |past: &String| {
            let index = contract.slots.iter().position(|slot| slot.past == *past);
            index.ok_or_else(|| unlisted(&format!("cache {past:?}")))
        };
        let selected = outputs.iter().fold(OutputSelector::no_default(), |all, name| all.with(name));
        Ok(Prepared {
            options: RunOptions::new()?.with_outputs(selected),
            pasts: call.pasts.iter().map(slot).collect::<Result<_>>()?,
            logits: call.logits.as_ref().and_then(place).unwrap_or(usize::MAX),
            filled,
            outputs,
        })
    }

    /// Runs a call. What it returns belongs to the caller, and stays in the runtime's memory.
    pub fn run(&mut self, call: &Call, prepared: &Prepared, feeds: Feeds<'_>) -> Result<Vec<DynTensor>> {
        let session = self.sessions.get_mut(&call.file).expect("prepared from this session");
        let fed = self.trace.as_ref().map(|_| feeds.iter().map(|(name, value)| entry(name, value)).collect());
        let result = session.run_with_options(feeds, &prepared.options);
        if let (Some(trace), Some(fed)) = (&mut self.trace, fed) {
            let got = result.as_ref().map(|outputs| outputs.iter().map(|(name, value)| entry(name, &value)).collect());
            trace.write(&call.file, fed, got)?;
        }
        let values = result?.into_iter().map(|(_, value)| value.downcast::<DynTensorValueType>());
        Ok(values.collect::<ort::Result<_>>()?)
    }
}

fn unlisted(what: &str) -> Error {
    Error::Contract(format!("the contract uses {what} without listing it"))
}

/// Compares a session with what the contract says of its file.
fn check(file: &File, session: &Session) -> Result<()> {
    let other =
        |what: String| Err(Error::Contract(format!("contract.json is of another model: {} has {what}", file.file)));
    for outlet in session.inputs() {
        match file.inputs.get(outlet.name()) {
            None => {
                return other(format!("an input {:?} that the contract does not feed", outlet.name()));
            }
            Some(port) if !fits(outlet, port) => {
                return other(format!("an input {:?} of {}", outlet.name(), outlet.dtype()));
            }
            Some(_) => {}
        }
    }
    if let Some(name) = file.inputs.keys().find(|name| session.inputs().iter().all(|one| one.name() != *name)) {
        return other(format!("no input {name:?}"));
    }
    if let Some(name) = file.outputs.iter().find(|name| session.outputs().iter().all(|one| one.name() != *name)) {
        return other(format!("no output {name:?}"));
    }
    Ok(())
}

/// Whether an input has the element type and the fixed sizes of the contract.
fn fits(outlet: &Outlet, port: &Port) -> bool {
    let ValueType::Tensor { ty, shape, .. } = outlet.dtype() else {
        return false;
    };
    // A graph that declares no shape looks like one of a scalar here.
    let sizes = shape.is_empty()
        || shape.len() == port.dims.len()
            && shape.iter().zip(&port.dims).all(|(size, dim)| match dim {
                Dim::Size(wanted) => *size < 0 || *size == *wanted as i64,
                Dim::Axis(_) => true,
            });
    *ty == port.dtype.into() && sizes
}
