//! Batches of blocks of which some lie in this host's memory and some in a GPU's.

/// What is in one of two places.
pub(crate) enum Placed<H, D> {
    /// In this host's memory.
    Host(H),
    /// In a GPU's.
    Device(D),
}

/// Does the items of each place in one go: one outcome an item, in order.
pub(crate) fn by_place<H, D, T>(
    items: Vec<Placed<H, D>>,
    host: impl FnOnce(Vec<H>) -> Vec<T>,
    device: impl FnOnce(Vec<D>) -> Vec<T>,
) -> Vec<T> {
    let (mut on_host, mut on_device) = (Vec::with_capacity(items.len()), Vec::new());
    let mut is_on_device = Vec::with_capacity(items.len());
    for item in items {
        is_on_device.push(matches!(item, Placed::Device(_)));
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
