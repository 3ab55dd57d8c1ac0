//! The values of a batch of sequences: what calls are fed of them, and what they become.

use std::collections::HashMap;

use ort::value::DynTensor;

use crate::contract::{Axis, Call, Carry, Contract, Copied, Dim, Made, Take, Terms};
use crate::graphs::{Feeds, Graphs, Tensors};
use crate::tensors::{Logits, join, size, tensor, write, zeros};
use crate::{Error, Result};

/// What the calls of a batch of sequences depend on.
#[derive(Default)]
pub struct State {
    /// Tokens in the cache, padding counted.
    pub length: usize,
    /// How many tokens of each sequence are padding, on the left.
    pub padding: Vec<usize>,
    /// The values to feed next; where there is none it is the encoded one.
    pub cache: Tensors,
    /// The source, and what the encoder made of it: with these the next sequences begin as well.
    pub encoded: Tensors,
    /// Rows with 0 for padding on the right of the source, in the order of the sequences.
    pub mask: Option<Vec<Vec<i64>>>,
    pub source_mask: Option<Vec<Vec<i64>>>,
    /// The most tokens that the cache has room for.
    pub capacity: usize,
}

/// What axes and sums count.
type Sizes<'a> = HashMap<&'a str, f64>;

impl State {
    /// A value of the cache, or of the encoder.
    fn value(&self, name: &str) -> Result<&DynTensor> {
        let value = self.cache.get(name).or_else(|| self.encoded.get(name));
        value.ok_or_else(|| Error::Argument(format!("there is no value {name:?}: begin with encode()")))
    }

    fn sizes(&self, contract: &Contract, batch: usize, new: usize) -> Sizes<'static> {
        let counted = [
            ("one", 1),
            ("batch", batch),
            ("batch_heads", batch * contract.heads),
            ("new", new),
            ("past", self.length),
            ("total", self.length + new),
            ("capacity", self.capacity),
        ];
        counted.into_iter().map(|(name, size)| (name, size as f64)).collect()
    }

    /// Forgets the sequences.
    pub fn clear(&mut self) {
        self.cache.clear();
        (self.length, self.padding, self.mask) = (0, Vec::new(), self.source_mask.clone());
    }

    /// Begins sequences with so much padding.
    pub fn begin(&mut self, contract: &Contract, padding: Vec<usize>) -> Result<()> {
        self.clear(); // releases the values before others are made
        let sizes = self.sizes(contract, padding.len(), 0);
        for one in &contract.zeros {
            self.cache.insert(one.value.clone(), zeros(one.dtype, &shape(&one.dims, &sizes))?);
        }
        self.padding = padding;
        Ok(())
    }

    /// Runs calls on new tokens, and keeps what they return of the cache; the logits of the last one, if it has some.
    pub fn run(
        &mut self,
        graphs: &mut Graphs,
        contract: &Contract,
        calls: &[Call],
        tokens: &[Vec<i64>],
    ) -> Result<Option<Logits>> {
        let mut logits = None;
        for call in calls {
            let mut sizes = self.sizes(contract, tokens.len(), tokens[0].len());
            for (name, of) in &call.sizes {
                sizes.insert(name, size(self.value(&of.value)?, of.axis) as f64);
            }
            let mut feeds = Feeds::with_capacity(call.values.len() + call.made.len());
            for (name, value) in &call.values {
                feeds.push((name, self.value(value)?.into()));
            }
            for made in &call.made {
                let shape = shape(&made.dims, &sizes);
                feeds.push((
                    &made.name,
                    tensor(made.dtype, &shape, &self.elements(made, &shape, &sizes, tokens))?.into(),
                ));
            }
            let mut outputs = graphs.run(call, feeds)?;
            let found = call.logits.as_ref().and_then(|name| outputs.remove(name));
            logits = found.map(|value| Logits::new(value, tokens.len())).transpose()?;
            self.take(&call.takes, outputs)?;
        }
        Ok(logits)
    }

    /// The elements of an input that is made for a call.
    fn elements(&self, made: &Made, shape: &[usize], sizes: &Sizes, tokens: &[Vec<i64>]) -> Vec<f64> {
        let last = shape.len().saturating_sub(1);
        let columns = if shape.is_empty() || made.batch_axis == Some(last) { 1 } else { shape[last] };
        let (mut sizes, queries) = (sizes.clone(), if last > 0 { shape[last - 1] } else { 1 });
        let copied = match made.copy {
            Some(Copied::Tokens) => Some(tokens),
            Some(Copied::Mask) => self.mask.as_deref(),
            None => None,
        };
        let mut elements = vec![made.outside; shape.iter().product()];
        for (number, row) in elements.chunks_mut(columns.max(1)).enumerate() {
            let each = |axis: usize| shape[(axis + 1).min(last)..last].iter().product::<usize>();
            let sequence = made.batch_axis.map_or(0, |axis| number / each(axis) % shape[axis]);
            let padding = made.batch_axis.and_then(|_| self.padding.get(sequence)).copied().unwrap_or(0);
            let of_row =
                [("columns", columns), ("query", number % queries), ("sequence", sequence), ("padding", padding)];
            sizes.extend(of_row.map(|(name, size)| (name, size as f64)));
            let place = |terms| sum(terms, &sizes).clamp(0.0, columns as f64) as usize;
            let (begin, inside) = (place(&made.begin), sum(&made.inside, &sizes));
            for (column, element) in row.iter_mut().enumerate().take(place(&made.end)).skip(begin) {
                *element = inside + made.step * column as f64;
            }
            // A mask of another length belongs to the input of the encoder alone.
            if let Some(values) = copied.map(|rows| &rows[sequence]).filter(|values| values.len() <= columns) {
                row.iter_mut().zip(values).for_each(|(element, value)| *element = *value as f64);
            }
        }
        elements
    }

    /// Keeps what a call returned of the cache, after all that could fail.
    fn take(&mut self, takes: &[Take], mut outputs: Tensors) -> Result<()> {
        let mut next = Vec::with_capacity(takes.len());
        for take in takes {
            if let Some(present) = outputs.remove(&take.output) {
                let past = take.axis.zip(self.cache.get_mut(&take.value));
                let value = next_value(take.carry, past, present, self.length)?;
                next.extend(value.map(|value| (take.value.clone(), value)));
            }
        }
        self.cache.extend(next); // releases the values before
        Ok(())
    }

    /// Goes back to an earlier length.
    pub fn cut(&mut self, axes: &[Axis], length: usize) -> Result<()> {
        let cut = |one: &Axis| Ok((one.value.clone(), join(one.axis, &[(self.value(&one.value)?, 0..length)])?));
        let cut = axes.iter().map(cut).collect::<Result<Vec<_>>>()?;
        self.cache.extend(cut);
        self.length = length;
        Ok(())
    }

    /// Makes row i a copy of what row `order[i]` was.
    pub fn reorder(&mut self, axes: &[Axis], order: &[usize]) -> Result<()> {
        let chosen = |one: &Axis| {
            let value = self.value(&one.value)?;
            let pieces: Vec<_> = order.iter().map(|row| (value, row * one.each..(row + 1) * one.each)).collect();
            Ok((one.value.clone(), join(one.axis, &pieces)?))
        };
        let chosen = axes.iter().map(chosen).collect::<Result<Vec<_>>>()?;
        self.cache.extend(chosen);
        self.padding = order.iter().map(|row| self.padding[*row]).collect();
        self.mask = self.mask.as_ref().map(|mask| order.iter().map(|row| mask[*row].clone()).collect());
        Ok(())
    }
}

/// A shape; an axis that nothing counts has size 1.
fn shape(dims: &[Dim], sizes: &Sizes) -> Vec<usize> {
    let size = |dim: &Dim| match dim {
        Dim::Size(size) => *size,
        Dim::Axis(axis) => sizes.get(axis.as_str()).map_or(1, |size| *size as usize),
    };
    dims.iter().map(size).collect()
}

fn sum(terms: &Terms, sizes: &Sizes) -> f64 {
    terms.iter().map(|(name, factor)| sizes.get(name.as_str()).unwrap_or(&0.0) * factor).sum()
}

/// The next value: the output itself, or what is made of it; `None` where it is written into the past.
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
        Carry::FeedBack => Ok(Some(present)),
        Carry::Append => join(axis, &[(past, 0..held), (&present, 0..count)]).map(Some),
        Carry::Shift => join(axis, &[(past, count.min(held)..held), (&present, 0..count)]).map(Some),
        Carry::DropOldest => join(axis, &[(&present, 1..count)]).map(Some),
        Carry::Write => write(past, axis, length, &present).map(|()| None),
    }
}
