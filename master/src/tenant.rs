//! The settings of one namespace, in a form that puts, calls and eviction read without a lock.

mod bucket;

use crate::clock::BootInstant;
use bucket::Bucket;
use kvpool_types::tenancy::DEFAULT_PRIORITY;
use kvpool_types::{Code, NamespaceSettings, Setting};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Stands for a setting without a value.
const NONE: u64 = u64::MAX;

/// A namespace that has or had settings.
#[derive(Debug)]
pub struct Tenant {
    /// The number of its order of eviction. Order 0 has the blocks of all namespaces without
    /// settings.
    pub order: u32,
    values: [AtomicU64; Setting::ALL.len()],
    /// Held while a hard quota of memory or blocks is compared and used. A segment's extents may be
    /// locked meanwhile.
    pub taking: Mutex<()>,
    calls: Bucket,
    bytes: Bucket,
}

impl Tenant {
    /// A tenant whose order of eviction has this number.
    pub fn new(order: u32, settings: &NamespaceSettings) -> Self {
        let tenant = Self {
            order,
            values: std::array::from_fn(|_| AtomicU64::new(NONE)),
            taking: Mutex::default(),
            calls: Bucket::default(),
            bytes: Bucket::default(),
        };
        tenant.set(settings);
        tenant
    }

    /// Replaces the settings. Calls in progress may still see earlier ones. A changed rate begins with
    /// a full bucket.
    pub fn set(&self, settings: &NamespaceSettings) {
        for (value, setting) in self.values.iter().zip(Setting::ALL) {
            let new = settings.get(*setting).unwrap_or(NONE);
            let is_changed = value.swap(new, Ordering::AcqRel) != new;
            match setting {
                Setting::Requests if is_changed => self.calls.fill(),
                Setting::Bytes if is_changed => self.bytes.fill(),
                _ => {}
            }
        }
    }

    /// A setting; `None` if it has no value.
    pub fn get(&self, setting: Setting) -> Option<u64> {
        let number = setting.to_wire() as usize;
        let value = self.values.get(number - 1)?.load(Ordering::Acquire);
        (value != NONE).then_some(value)
    }

    /// Counts a call against the rates. An error holds the code of the exceeded rate, and the time
    /// until it allows a call.
    pub fn admit(&self, now: BootInstant, moves_bytes: bool) -> Result<(), (Code, Duration)> {
        if moves_bytes && self.get(Setting::Bytes).is_some() {
            let left = self.bytes.check(now);
            left.map_err(|wait| (Code::ByteRate, wait))?;
        }
        if let Some(rate) = self.get(Setting::Requests) {
            let taken = self.calls.take_one(rate, now);
            taken.map_err(|wait| (Code::RequestRate, wait))?;
        }
        Ok(())
    }

    /// Counts bytes that an admitted call moves.
    pub fn moved(&self, bytes: u64, now: BootInstant) {
        if let Some(rate) = self.get(Setting::Bytes) {
            self.bytes.take(bytes, rate, now);
        }
    }

    /// The priority in eviction: blocks of lower priorities are evicted first.
    pub fn priority(&self) -> u64 {
        self.get(Setting::Priority).unwrap_or(DEFAULT_PRIORITY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_settings_replace_all_earlier_ones() {
        let first = NamespaceSettings::default()
            .with(Setting::MemoryHard, 7)
            .with(Setting::Priority, 1);
        let tenant = Tenant::new(1, &first);
        assert_eq!(
            (tenant.get(Setting::MemoryHard), tenant.priority()),
            (Some(7), 1)
        );
        tenant.set(&NamespaceSettings::default().with(Setting::Bytes, 9));
        assert_eq!(tenant.get(Setting::MemoryHard), None);
        assert_eq!(
            (tenant.get(Setting::Bytes), tenant.priority()),
            (Some(9), 5)
        );
    }

    /// The debt of calls at one rate says nothing about another rate.
    #[test]
    fn a_changed_rate_forgets_what_was_owed_at_the_earlier_one() {
        let now = BootInstant(1_000_000);
        let rates = |calls, bytes| {
            NamespaceSettings::default()
                .with(Setting::Requests, calls)
                .with(Setting::Bytes, bytes)
        };
        let tenant = Tenant::new(1, &rates(2, 1000));
        while tenant.admit(now, false).is_ok() {}
        tenant.moved(3_600_000, now);
        tenant.set(&rates(100, 1000));
        assert_eq!(
            tenant.admit(now, false),
            Ok(()),
            "the rate of calls was raised"
        );
        let owed = tenant.admit(now, true);
        assert!(
            matches!(owed, Err((Code::ByteRate, _))),
            "an unchanged rate keeps what is owed: {owed:?}"
        );
        tenant.set(&rates(100, 2_000_000));
        assert_eq!(
            tenant.admit(now, true),
            Ok(()),
            "the rate of bytes was raised"
        );
        tenant.moved(3_600_000_000, now);
        tenant.set(&NamespaceSettings::default());
        tenant.set(&rates(100, 2_000_000));
        assert_eq!(tenant.admit(now, true), Ok(()), "the rate was cleared");
    }
}
