//! Batches whose blocks are partly in host memory and partly in a GPU's memory.

use kvpool_client::{PutBlock, order_matters};

/// An item in one of two places.
pub(crate) enum Placed<H, D> {
    /// In host memory.
    Host(H),
    /// In a GPU's memory.
    Device(D),
}

impl<H, D> Placed<H, D> {
    const fn is_on_device(&self) -> bool {
        matches!(self, Self::Device(_))
    }
}

/// [`by_place`] for puts. The master links a block only to a parent that is committed before the block, and the last
/// upsert of a key stays. So if a block's parent, or another block of its key, is in the other place, this puts runs
/// of items in one place together, in order.
pub(crate) fn put_by_place<H, D, T>(
    puts: Vec<Placed<PutBlock<H>, PutBlock<D>>>,
    host: impl Fn(Vec<PutBlock<H>>) -> Vec<T>,
    device: impl Fn(Vec<PutBlock<D>>) -> Vec<T>,
) -> Vec<T> {
    let named = puts.iter().map(|put| {
        let part = usize::from(put.is_on_device());
        match put {
            Placed::Host(put) => (part, &put.key, put.parent.as_ref()),
            Placed::Device(put) => (part, &put.key, put.parent.as_ref()),
        }
    });
    if !puts.iter().any(Placed::is_on_device) || !order_matters(named) {
        return by_place(puts, host, device);
    }
    let mut outcomes = Vec::with_capacity(puts.len());
    let mut puts = puts.into_iter().peekable();
    while let Some(first) = puts.next() {
        let is_on_device = first.is_on_device();
        let mut together = vec![first];
        while let Some(next) = puts.next_if(|put| put.is_on_device() == is_on_device) {
            together.push(next);
        }
        outcomes.extend(by_place(together, &host, &device));
    }
    outcomes
}

/// Handles the items of each place in one batch. Returns one outcome for each item, in order.
pub(crate) fn by_place<H, D, T>(
    items: Vec<Placed<H, D>>,
    host: impl FnOnce(Vec<H>) -> Vec<T>,
    device: impl FnOnce(Vec<D>) -> Vec<T>,
) -> Vec<T> {
    let (mut on_host, mut on_device) = (Vec::with_capacity(items.len()), Vec::new());
    let mut is_on_device = Vec::with_capacity(items.len());
    for item in items {
        is_on_device.push(item.is_on_device());
        match item {
            Placed::Host(item) => on_host.push(item),
            Placed::Device(item) => on_device.push(item),
        }
    }
    if on_device.is_empty() {
        return host(on_host);
    }
    let mut of_device = device(on_device).into_iter();
    let of_host = if on_host.is_empty() {
        Vec::new()
    } else {
        host(on_host)
    };
    let mut of_host = of_host.into_iter();
    let outcomes = is_on_device.into_iter().filter_map(|is_on_device| {
        if is_on_device {
            of_device.next()
        } else {
            of_host.next()
        }
    });
    outcomes.collect()
}
