//! The gauges of the largest namespaces. There are at most [`MOST`] label values at a time.

use crate::overview::NamespaceUse;
use kvpool_types::namespace::DEFAULT_NAME;
use parking_lot::Mutex;
use prometheus::{IntGaugeVec, Opts, Registry};

/// The most namespaces with series: those with the most bytes.
pub(crate) const MOST: usize = 32;

/// The gauges, by namespace.
#[derive(Debug)]
pub(super) struct NamespaceGauges {
    memory: IntGaugeVec,
    media: IntGaugeVec,
    blocks: IntGaugeVec,
    /// The namespaces that have series now.
    shown: Mutex<Vec<String>>,
}

impl NamespaceGauges {
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauge = |name: &str, help: &str| {
            let opts = Opts::new(format!("kvpool_master_{name}"), help);
            let gauge = IntGaugeVec::new(opts, &["namespace"])?;
            gauge.with_label_values(&[DEFAULT_NAME]).set(0);
            registry.register(Box::new(gauge.clone()))?;
            Ok::<_, prometheus::Error>(gauge)
        };
        Ok(Self {
            memory: gauge(
                "namespace_memory_bytes",
                "Bytes of memory of the largest namespaces, with open puts.",
            )?,
            media: gauge(
                "namespace_media_bytes",
                "Bytes on media of the largest namespaces.",
            )?,
            blocks: gauge(
                "namespace_blocks",
                "Blocks in memory of the largest namespaces.",
            )?,
            shown: Mutex::new(vec![DEFAULT_NAME.to_owned()]),
        })
    }

    pub(super) fn set(&self, largest: &[NamespaceUse]) {
        let whole = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        let mut shown = self.shown.lock();
        for one in largest {
            let label = &[one.name.as_str()];
            self.memory.with_label_values(label).set(whole(one.bytes));
            self.media
                .with_label_values(label)
                .set(whole(one.copy_bytes));
            self.blocks.with_label_values(label).set(whole(one.blocks));
        }
        for gone in shown.iter() {
            if largest.iter().all(|one| one.name != *gone) {
                for gauge in [&self.memory, &self.media, &self.blocks] {
                    // It fails only for a series that is not there.
                    let _absent = gauge.remove_label_values(&[gone.as_str()]);
                }
            }
        }
        *shown = largest.iter().map(|one| one.name.clone()).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_present_largest_namespaces_have_series() {
        let registry = Registry::new();
        let gauges = NamespaceGauges::new(&registry).unwrap();
        let of = |name: &str, bytes| NamespaceUse {
            name: name.into(),
            bytes,
            ..NamespaceUse::default()
        };
        gauges.set(&[of("a", 7), of("b", 5)]);
        gauges.set(&[of("c", 9), of("a", 8)]);
        let families = registry.gather();
        let memory = families
            .iter()
            .find(|family| family.name() == "kvpool_master_namespace_memory_bytes")
            .unwrap();
        let series = memory.get_metric().iter();
        let mut series: Vec<_> = series
            .map(|one| {
                (
                    one.get_label()[0].value().to_owned(),
                    one.get_gauge().get_value(),
                )
            })
            .collect();
        series.sort_by(|one, other| one.0.cmp(&other.0));
        assert_eq!(series, [("a".to_owned(), 8.0), ("c".to_owned(), 9.0)]);
    }
}
