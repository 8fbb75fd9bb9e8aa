//! Accounts, quotas and shares of namespaces.

use super::Mechanism;

pub(super) const MECHANISMS: &[Mechanism] = &[
    Mechanism {
        invariant: 8,
        what: "eviction for others leaves a guaranteed share",
        file: "master/src/directory/evict_tenants.rs",
        on: "    share.is_some_and(|share| accounts.of(id).get(Item::Resident) < share.saturating_add(bytes))",
        off: "    share.is_some_and(|share| accounts.of(id).get(Item::Resident) < bytes && share > 0)",
        package: "kvpool-master",
        test: "eviction_for_others_never_takes_a_namespace_below_its_guaranteed_share",
    },
    Mechanism {
        invariant: 8,
        what: "blocks above a soft quota leave first",
        file: "master/src/directory/evict_tenants.rs",
        on: "Some((account, tenant)) => (!is_above_soft(account, tenant), tenant.priority()),",
        off: "Some((account, tenant)) => (is_above_soft(account, tenant) || true, tenant.priority()),",
        package: "kvpool-master",
        test: "blocks_over_a_soft_quota_leave_first_and_then_the_lowest_priority",
    },
    Mechanism {
        invariant: 8,
        what: "blocks that were there before the first settings move to the tenant's order",
        file: "master/src/directory/evict_tenants.rs",
        on: "stripe.correct_order(slot, &self.common);",
        off: "let _stays = slot;",
        package: "kvpool-master",
        test: "settings_hold_for_blocks_that_were_there_before_them",
    },
    Mechanism {
        invariant: 9,
        what: "a put does not pass a hard quota",
        file: "master/src/pool/reserve.rs",
        on: "if let Some(code) = broken_quota(account, tenant, bytes) {",
        off: "if let Some(code) = broken_quota(account, tenant, bytes).filter(|_| false) {",
        package: "kvpool-master",
        test: "a_hard_quota_is_never_passed_and_its_puts_evict_their_own_blocks_only",
    },
    Mechanism {
        invariant: 9,
        what: "a deleted namespace gets no block",
        file: "master/src/pool/tenancy.rs",
        on: "        account.close(true);\n",
        off: "        account.close(false);\n",
        package: "kvpool-master",
        test: "a_namespace_is_changed_shown_and_deleted_and_stays_so_after_a_restart",
    },
    Mechanism {
        invariant: 5,
        what: "the charge of an extent ends with its quarantine",
        file: "master/src/placement.rs",
        on: "            extents.discharge(index);\n",
        off: "",
        package: "kvpool-master",
        test: "the_sums_over_namespaces_are_what_the_pool_holds_also_after_a_restart",
    },
    Mechanism {
        invariant: 9,
        what: "a namespace at its rate is refused",
        file: "master/src/tenant/bucket.rs",
        on: "(next <= full(now)).then_some(next)",
        off: "Some(next)",
        package: "kvpool-master",
        test: "a_namespace_at_its_rate_is_refused_with_a_hint_and_no_other_is",
    },
];
