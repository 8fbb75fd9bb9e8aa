//! The part of etcd's API that kvpool uses: key-value transactions, leases, watches, maintenance.
